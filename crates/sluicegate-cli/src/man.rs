//! `sluicegate man`: manual pages, generated from the same texts as `--help`.

use std::{
    io,
    path::{Path, PathBuf},
};

use clap::{Args, CommandFactory};
use clap_mangen::Man as Page;

use crate::{Cli, CommandResult, ExitStatus, output};

/// Print a manual page, or write all of them to a directory
///
/// For example: sluicegate man check | man -l -
#[derive(Args)]
pub(crate) struct Man {
    /// Command to print the page of, for example "rules check" [default: sluicegate itself]
    command: Vec<String>,

    /// Write the pages of all commands to this directory, for example ~/.local/share/man/man1
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "command")]
    dir: Option<PathBuf>,
}

impl Man {
    pub(crate) fn run(self) -> CommandResult {
        if let Some(dir) = self.dir {
            write_pages(find_command(&[])?, &dir)
                .map_err(|error| format!("{}: {error}: create the directory first", dir.display()))?;
            return Ok(ExitStatus::Success);
        }
        let mut text = Vec::new();
        page(find_command(&self.command)?).render(&mut text)?;
        output::raw(&text);
        Ok(ExitStatus::Success)
    }
}

/// Writes the pages of a command and its subcommands.
fn write_pages(command: clap::Command, dir: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands() {
        write_pages(subcommand.clone(), dir)?;
    }
    page(command).generate_to(dir).map(drop)
}

fn page(command: clap::Command) -> Page {
    Page::new(command).source(concat!("sluicegate ", env!("CARGO_PKG_VERSION"))).manual("sluicegate")
}

/// Finds a command by its path, such as `["rules", "check"]`.
fn find_command(path: &[String]) -> Result<clap::Command, String> {
    let mut command = Cli::command().disable_help_subcommand(true);
    // sets each command's full name, which is the name of its page
    command.build();
    for name in path {
        let found = command.find_subcommand(name).cloned();
        command = found.ok_or_else(|| {
            let known: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
            format!("unknown command {name:?}: use one of {}", known.join(", "))
        })?;
    }
    Ok(command)
}
