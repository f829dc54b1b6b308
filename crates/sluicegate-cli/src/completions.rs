//! `sluicegate completions`: shell completion scripts.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::{Cli, CommandResult, ExitStatus, output};

/// Print the completion script of a shell
///
/// For example: sluicegate completions bash > ~/.local/share/bash-completion/completions/sluicegate
#[derive(Args)]
pub(crate) struct Completions {
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> CommandResult {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "sluicegate", &mut script);
        output::raw(&script);
        Ok(ExitStatus::Success)
    }
}
