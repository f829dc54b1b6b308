//! The pages, anchors, files and tests that the pages refer to exist.

use std::{collections::BTreeSet, fs, path::PathBuf};

use regex::Regex;

use super::markdown::{self, Page, below, root};

#[test]
fn every_link_and_anchor_resolves() {
    let mut broken = Vec::new();
    for page in markdown::all() {
        for link in page.links() {
            let target = &*link.target;
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) =
                target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
            let path = match file {
                "" => page.path.clone(),
                _ => normalized(&page.path.parent().unwrap().join(file)),
            };
            let place = format!("{}:{}: {target}", page.path.display(), link.line);
            if !root().join(&path).exists() {
                broken.push(place);
            } else if let Some(anchor) = anchor
                && !Page::read(path).anchors().iter().any(|known| known == anchor)
            {
                broken.push(format!("{place} (no such heading)"));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

/// Removes `..` from a path.
fn normalized(path: &std::path::Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => drop(normal.pop()),
            std::path::Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[test]
fn every_page_of_the_guide_is_in_its_table_of_contents() {
    let summary = Page::read("docs/SUMMARY.md");
    let listed: Vec<_> = summary
        .links()
        .into_iter()
        .map(|link| normalized(&PathBuf::from("docs").join(link.target)))
        .collect();
    let pages: BTreeSet<_> =
        below("docs", "md").into_iter().filter(|path| !path.ends_with("SUMMARY.md")).collect();
    let in_docs = listed.iter().filter(|path| path.starts_with("docs")).cloned().collect::<BTreeSet<_>>();
    assert_eq!(in_docs, pages, "docs/SUMMARY.md (left) and the existing pages (right)");
    assert_eq!(listed.len(), listed.iter().collect::<BTreeSet<_>>().len(), "a page is listed twice");
    let book = fs::read_to_string(root().join("book.toml")).unwrap();
    assert!(book.contains("src = \"docs\""), "{book}");
}

#[test]
fn the_table_of_contents_has_the_form_that_mdbook_reads() {
    let chapter = Regex::new(r"^(- )?\[[^\]]+\]\([a-z0-9-]+\.md\)$").unwrap();
    let text = Page::read("docs/SUMMARY.md").text;
    let mut lines = text.lines().filter(|line| !line.is_empty());
    assert_eq!(lines.next(), Some("# Summary"));
    let mut is_in_a_part = false;
    for line in lines {
        if line.starts_with("# ") {
            is_in_a_part = true;
            continue;
        }
        assert!(chapter.is_match(line), "neither a part nor a chapter: {line}");
        assert_eq!(line.starts_with("- "), is_in_a_part, "only chapters of a part are list items: {line}");
    }
}

#[test]
fn every_page_of_the_guide_has_one_title_at_its_start() {
    for path in below("docs", "md") {
        let page = Page::read(path);
        assert!(page.text.starts_with("# "), "{}: the first line is not a title", page.path.display());
        let titles = page.titles();
        let is_table_of_contents = page.path.ends_with("SUMMARY.md");
        assert!(titles == 1 || is_table_of_contents, "{}: {titles} titles", page.path.display());
    }
}

#[test]
fn every_mentioned_file_exists() {
    const PLACES: &[&str] = &["crates/", "docs/", "deploy/", "scripts/", "bench/", ".ci/"];
    let mut missing = Vec::new();
    for page in markdown::all() {
        for (line, name) in page.code_spans() {
            let name = name.split_whitespace().next().unwrap_or_default();
            if PLACES.iter().any(|place| name.starts_with(place)) && !name.contains(['*', '<', '{', '…']) {
                let path = name.trim_end_matches([',', ':']).split(':').next().unwrap();
                if !root().join(path).exists() {
                    missing.push(format!("{}:{line}: {path}", page.path.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "missing files:\n{}", missing.join("\n"));
}

#[test]
fn every_test_named_by_a_promise_exists() {
    let sources: Vec<_> =
        below("crates", "rs").iter().map(|path| fs::read_to_string(root().join(path)).unwrap()).collect();
    let is_a_name = |name: &str| {
        name.matches('_').count() >= 3
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let mut named = 0;
    for (line, name) in Page::read("docs/promises.md").code_spans() {
        if is_a_name(&name) && !name.starts_with("sluicegate_") {
            named += 1;
            // the last form is the declaration in the conformance suite
            let declared = [format!("fn {name}("), format!("fn {name}<"), format!(" {name}(fixture)")];
            let exists = sources.iter().any(|source| declared.iter().any(|form| source.contains(form)));
            assert!(exists, "docs/promises.md:{line}: there is no test `{name}`");
        }
    }
    assert!(named > 30, "only {named} tests are named");
}

#[test]
fn every_guarantee_is_in_the_appendix_of_tests() {
    let page = Page::read("docs/promises.md");
    let (guarantees, appendix) = page.text.split_once("\n## Appendix").unwrap();
    let section = |heading: &str| {
        let rest = guarantees.split_once(&format!("\n## {heading}\n")).unwrap().1;
        rest.split_once("\n## ").unwrap().0
    };
    fn cells(text: &str) -> impl Iterator<Item = &str> {
        text.lines().filter_map(|line| Some(line.strip_prefix("| ")?.split_once(" | ")?.0))
    }
    let details = section("Guarantees in detail").lines();
    let named = details.filter_map(|line| Some(line.strip_prefix("* **")?.split_once(".**")?.0));
    let situations = cells(section("Maximum admitted")).filter(|situation| *situation != "a combination");
    let guarantees: BTreeSet<_> = named.chain(situations).collect();
    let with_tests: BTreeSet<_> = cells(appendix).collect();
    let missing: Vec<_> = guarantees.difference(&with_tests).collect();
    assert!(missing.is_empty(), "docs/promises.md: no tests in the appendix for {missing:?}");
    assert!(guarantees.len() > 50, "only {} guarantees are found", guarantees.len());
}
