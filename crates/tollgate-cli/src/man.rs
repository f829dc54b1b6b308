//! `tollgate man`: the manual, from the same words as `--help`.

use std::{
    io,
    path::{Path, PathBuf},
};

use clap::{Args, CommandFactory};
use clap_mangen::Man as Page;

use crate::{Cli, Done, Verdict, output};

/// Print a page of the manual, or write all of them
///
/// For example: tollgate man check | man -l -
#[derive(Args)]
pub(crate) struct Man {
    /// The command that the page is about, for example "rules check"; tollgate itself unless set
    command: Vec<String>,

    /// Writes the pages of all commands into this directory, for example ~/.local/share/man/man1
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "command")]
    dir: Option<PathBuf>,
}

impl Man {
    pub(crate) fn run(self) -> Done {
        if let Some(dir) = self.dir {
            write(about(&[])?, &dir)
                .map_err(|error| format!("{}: {error}: make the directory first", dir.display()))?;
            return Ok(Verdict::Fine);
        }
        let mut text = Vec::new();
        page(about(&self.command)?).render(&mut text)?;
        output::verbatim(&text);
        Ok(Verdict::Fine)
    }
}

/// Writes the pages of a command and of those below it.
fn write(command: clap::Command, dir: &Path) -> io::Result<()> {
    for below in command.get_subcommands() {
        write(below.clone(), dir)?;
    }
    page(command).generate_to(dir).map(drop)
}

fn page(command: clap::Command) -> Page {
    Page::new(command).source(concat!("tollgate ", env!("CARGO_PKG_VERSION"))).manual("tollgate")
}

/// The command of these words.
fn about(words: &[String]) -> Result<clap::Command, String> {
    let mut command = Cli::command().disable_help_subcommand(true);
    // names every command by its whole way, as its page is called
    command.build();
    for word in words {
        let found = command.find_subcommand(word).cloned();
        command = found.ok_or_else(|| {
            let known: Vec<_> = command.get_subcommands().map(clap::Command::get_name).collect();
            format!("there is no command {word:?}: name one of {}", known.join(", "))
        })?;
    }
    Ok(command)
}
