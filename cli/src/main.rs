//! The program `tilewise`.

fn main() {}
