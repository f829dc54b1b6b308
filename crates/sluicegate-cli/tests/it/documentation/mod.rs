//! Tests the documentation: every command is run, every configuration is read, every link is resolved. `stubs` contains
//! replacements of programs: `cargo install`, for example, builds nothing.
//!
//! * `markdown`: pages with their code blocks, links and headings
//! * `session`: a shell in its own network namespace, where the documented ports are free
//! * `page`: runs or reads each block of a page
//! * `output`: compares the output of a command with the page
//! * `links`: links, anchors, titles, the table of contents, names of files and tests
//! * `reference`: the page that is generated from the schema
//! * `languages`: the Lua script used by Python and Node, compared with the server
//!
//! A comment above a block marks one that no test can run (`<!-- not run: needs Docker -->`) or the content of a file
//! (`<!-- file: sluicegate.toml -->`). Each page is a separate test, so that pages run in parallel.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod languages;
mod links;
mod markdown;
mod output;
mod page;
mod reference;
mod session;

use sluicegate_server::config::{Environment, Flags, Source};

/// One test for each page.
macro_rules! pages {
    ($($name:ident: $path:literal,)*) => {
        const PAGES: &[&str] = &[$($path),*];

        mod every_block_works {
            $(
                #[test]
                fn $name() {
                    crate::documentation::page::check($path);
                }
            )*
        }
    };
}

pages! {
    readme: "README.md",
    contributing: "CONTRIBUTING.md",
    index: "docs/index.md",
    start: "docs/start.md",
    install: "docs/install.md",
    decision: "docs/decision.md",
    faq: "docs/faq.md",
    rules: "docs/rules.md",
    configuration: "docs/configuration.md",
    leases: "docs/leases.md",
    budgets: "docs/budgets.md",
    in_flight: "docs/in-flight.md",
    simulate: "docs/simulate.md",
    http: "docs/http.md",
    forward_auth: "docs/forward-auth.md",
    envoy: "docs/envoy.md",
    resp: "docs/resp.md",
    middleware: "docs/middleware.md",
    node: "docs/node.md",
    python: "docs/python.md",
    lua: "docs/lua.md",
    moving: "docs/moving.md",
    cli: "docs/cli.md",
    operating: "docs/operating.md",
    dashboard: "docs/dashboard.md",
    redis: "docs/redis.md",
    doctor: "docs/doctor.md",
    load: "docs/load.md",
    metrics: "docs/metrics.md",
    promises: "docs/promises.md",
    benchmarks: "docs/benchmarks.md",
    benchmarks_fronts: "docs/benchmarks-fronts.md",
    scaling: "docs/scaling.md",
}

#[test]
fn every_page_with_a_block_of_code_is_tested() {
    for page in markdown::guide() {
        let path = page.path.to_str().unwrap();
        let tested = PAGES.contains(&path) || page.blocks().is_empty();
        assert!(tested, "{path} has code blocks: add it to the pages in {}", file!());
    }
    for path in PAGES {
        assert!(
            markdown::root().join(path).is_file(),
            "{path} does not exist: remove it from the pages in {}",
            file!()
        );
    }
}

#[test]
fn every_example_configuration_sets_failure_policies() {
    let files = markdown::below("docs/examples", "toml");
    assert!(!files.is_empty());
    for file in files {
        let flags = Flags { config: Some(markdown::root().join(&file)), ..Flags::default() };
        let source = Source { flags, environment: Environment::of([]), ..Source::default() };
        page::assert_sets_failure_policies(source, &file.display().to_string());
    }
}

/// The maximum number of skipped blocks. Raise it only for a block that cannot be run.
const MAX_NOT_RUN: usize = 34;

#[test]
fn few_blocks_are_skipped_and_each_states_why() {
    let mut not_run = Vec::new();
    for page in markdown::guide() {
        for block in page.blocks() {
            if let markdown::Mark::NotRun(reason) = &block.mark {
                assert!(reason.len() > 5, "{}: state why it is not run", page.place(&block));
                not_run.push(format!("{}: {reason}", page.place(&block)));
            }
        }
    }
    assert!(not_run.len() <= MAX_NOT_RUN, "{} blocks are not run:\n{}", not_run.len(), not_run.join("\n"));
}
