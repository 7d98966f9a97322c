//! `lockkit man`: the manual, as roff.

use clap::{Args as ClapArgs, Command};
use clap_mangen::Man;

use crate::{
    exit::{self, Exit, Failure, USAGE},
    show::print,
};

/// Print the manual page of lockkit, or of one of its subcommands, as roff
///
/// For example: lockkit man run | man -l -
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The subcommand
    subcommand: Option<String>,
}

pub(crate) fn run(args: &Args, mut command: Command) -> Exit {
    // Gives the subcommands their full names, such as lockkit-run.
    command.build();
    let page = match &args.subcommand {
        None => command,
        Some(name) => find(&command, name)?,
    };
    let mut text = Vec::new();
    let page = page.after_long_help(None::<&str>).disable_help_subcommand(true);
    Man::new(page).manual("lockkit").render(&mut text).map_err(|error| Failure::system("write the manual", &error))?;
    print(|out| {
        out.write_all(&text)?;
        // Set as it stands, for it is a table.
        writeln!(out, ".SH EXIT STATUS\n.nf\n{}\n.fi", exit::CODES.replace('\'', "\\(aq"))
    })?;
    Ok(0)
}

fn find(command: &Command, name: &str) -> Result<Command, Failure> {
    let sub = command.find_subcommand(name).filter(|sub| !sub.is_hide_set()).cloned();
    sub.ok_or_else(|| Failure::new(USAGE, "there is no such subcommand; lockkit --help lists them"))
}
