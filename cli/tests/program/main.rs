//! The program as its users run it: arguments and files in, text, JSON and exit codes out.

mod bad_input;
mod bench;
mod cases;
mod made_cases;
mod plan;
mod run;
mod support;
mod tune;
mod verify;
