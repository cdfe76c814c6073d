//! The program `tilewise`: plans, runs, verifies and measures attention on this machine.

mod args;
mod bench;
mod cases;
mod info;
mod measure;
mod output;
mod plan;
mod plot;
mod roofline;
mod run;
mod tensors;
mod verify;
mod walkthrough;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    match start(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            // One line, whatever drivers and parsers put into their messages.
            let text = output::error_text(&error);
            let words: Vec<_> = text.split_whitespace().collect();
            eprintln!("error: {}", output::printable(&words.join(" ")));
            ExitCode::FAILURE
        }
    }
}

fn start(cli: Cli) -> anyhow::Result<ExitCode> {
    let Cli { common, command } = cli;
    // The short bench is what `tilewise` alone does: bench with its defaults.
    let command = match command {
        Some(command) => command,
        None => Command::default_bench()?,
    };
    match command {
        Command::Info => info::run(&common)?,
        Command::Plan(args) => plan::run(&args, &common)?,
        Command::Run(args) => run::run(&args, &common)?,
        Command::Verify(args) => return verify::run(&args, &common),
        Command::Bench(args) => bench::run(&args, &common)?,
        Command::Tune(args) => bench::tune(&args, &common)?,
        Command::Walkthrough => walkthrough::run(&common)?,
    }
    Ok(ExitCode::SUCCESS)
}
