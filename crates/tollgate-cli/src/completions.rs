//! `tollgate completions`: what a shell needs to complete our words.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::{Cli, Done, Verdict, output};

/// Print the completions for a shell
///
/// For example: tollgate completions bash > ~/.local/share/bash-completion/completions/tollgate
#[derive(Args)]
pub(crate) struct Completions {
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> Done {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "tollgate", &mut script);
        output::verbatim(&script);
        Ok(Verdict::Fine)
    }
}
