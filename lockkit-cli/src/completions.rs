//! `lockkit completions`: what a shell needs to complete command lines.

use clap::{Args as ClapArgs, Command};
use clap_complete::Shell;

use crate::{exit::Exit, show::print};

/// Print what a shell needs to complete command lines
///
/// For example: lockkit completions bash > /etc/bash_completion.d/lockkit
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args, mut command: Command) -> Exit {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "lockkit", &mut text);
    print(|out| out.write_all(&text))?;
    Ok(0)
}
