use std::fs;

use crate::command::{run, sluicegate};

#[test]
fn every_shell_has_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let printed = run(&mut sluicegate(&["completions", shell]));
        assert_eq!((printed.code, &*printed.err), (Some(0), ""));
        for word in ["explain", "import", "store"] {
            assert!(printed.out.contains(word), "{shell}: {word}");
        }
        // elvish and powershell complete no values
        let completes_values = ["bash", "zsh", "fish"].contains(&shell);
        assert_eq!(printed.out.contains("sliding-counter"), completes_values, "{shell}");
    }
    let failed = run(&mut sluicegate(&["completions", "tcsh"]));
    assert!(failed.code == Some(2) && failed.err.contains("[possible values: bash"), "{failed:?}");
}

#[test]
fn every_command_has_a_manual_page_and_a_help_of_at_most_100_columns() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let written = run(&mut sluicegate(&["man", "--dir", path]));
    assert_eq!((written.code, &*written.out, &*written.err), (Some(0), "", ""));
    let mut pages: Vec<String> = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        pages.push(name.strip_suffix(".1").unwrap().to_owned());
    }
    for known in ["sluicegate", "sluicegate-check", "sluicegate-rules-import-envoy", "sluicegate-man"] {
        assert!(pages.iter().any(|page| page == known), "{known} is missing: {pages:?}");
    }
    for page in pages {
        let words: Vec<&str> = page.split('-').skip(1).collect();
        let printed = run(&mut sluicegate(&[&["man"][..], &words].concat()));
        assert!(
            printed.out.contains(".SH SYNOPSIS") && printed.out.contains(".SH OPTIONS"),
            "{page}: {printed:?}"
        );
        assert_eq!(fs::read_to_string(directory.path().join(format!("{page}.1"))).unwrap(), printed.out);
        let help = run(&mut sluicegate(&[&words[..], &["--help"]].concat()));
        assert_eq!((help.code, &*help.err), (Some(0), ""), "{page}");
        assert!(
            help.out.starts_with(|c: char| c.is_uppercase()) && help.out.contains("Usage: sluicegate"),
            "{page}: {}",
            help.out
        );
        assert!(help.out.lines().all(|line| line.chars().count() <= 100), "{page}: {}", help.out);
    }
    let failed = run(&mut sluicegate(&["man", "nope"]));
    assert!(
        failed.code == Some(2) && failed.err.contains("unknown command \"nope\": use one of serve, check"),
        "{failed:?}"
    );
    let failed = run(&mut sluicegate(&["man", "--dir", "/nowhere/at/all"]));
    assert!(failed.code == Some(2) && failed.err.contains("create the directory first"), "{failed:?}");
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let mut command = sluicegate(&["rules", "schema"]);
    let mut child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]));
}

#[test]
fn a_full_device_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = sluicegate(&["rules", "schema"]).stdout(full).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("could not be written"), "{stderr}");
}
