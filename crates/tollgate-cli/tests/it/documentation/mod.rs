//! The documentation is true: every command in it is run, every configuration is read, every link leads somewhere. What
//! stands in for programs, and so is not tried here, is in `stubs`: above all, `cargo install` builds nothing.
//!
//! * `markdown`: pages, their blocks of code, links and headings
//! * `session`: a shell in a network of its own, where the ports of the documentation are free
//! * `page`: what is done with each block of a page
//! * `output`: whether what a command says is what the page shows
//! * `links`: links, anchors, the table of contents, names of files and tests
//! * `reference`: the page that is made from the schema
//! * `languages`: the Lua script as Python and Node use it, beside the server
//!
//! A block that no test can run says so in a comment above it: `<!-- not run: needs Docker -->`. One that is a file says
//! which: `<!-- file: tollgate.toml -->`. Each page is a test of its own, so that they run side by side.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod languages;
mod links;
mod markdown;
mod output;
mod page;
mod reference;
mod session;

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
    rules: "docs/rules.md",
    configuration: "docs/configuration.md",
    simulate: "docs/simulate.md",
    http: "docs/http.md",
    forward_auth: "docs/forward-auth.md",
    envoy: "docs/envoy.md",
    resp: "docs/resp.md",
    middleware: "docs/middleware.md",
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
        assert!(tested, "{path} has blocks of code: add a line to the pages in {}", file!());
    }
    for path in PAGES {
        assert!(markdown::root().join(path).is_file(), "{path} is gone: remove its line in {}", file!());
    }
}

/// How many blocks may go unrun. Raise it only for one that truly cannot be.
const MAX_NOT_RUN: usize = 24;

#[test]
fn few_blocks_are_not_run_and_each_says_why() {
    let mut not_run = Vec::new();
    for page in markdown::guide() {
        for block in page.blocks() {
            if let markdown::Mark::NotRun(reason) = &block.mark {
                assert!(reason.len() > 5, "{}: say why it is not run", page.place(&block));
                not_run.push(format!("{}: {reason}", page.place(&block)));
            }
        }
    }
    assert!(not_run.len() <= MAX_NOT_RUN, "{} blocks are not run:\n{}", not_run.len(), not_run.join("\n"));
}
