//! Markdown pages: code blocks, links and headings.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use regex::Regex;

/// The directory of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

pub(crate) struct Page {
    /// Relative to the root.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// A block of code.
pub(crate) struct Block {
    /// The first line of the code, from 1.
    pub(crate) line: usize,
    /// The text after the fence; may be empty.
    pub(crate) language: String,
    pub(crate) text: String,
    pub(crate) mark: Mark,
}

/// The comment above a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    None,
    /// It is not run, for this reason.
    NotRun(String),
    /// It is the content of this file.
    File(String),
}

/// A link or an image.
pub(crate) struct Link {
    pub(crate) line: usize,
    pub(crate) target: String,
}

/// Returns the pages whose blocks are run: README, CONTRIBUTING and the guide.
pub(crate) fn guide() -> Vec<Page> {
    let mut paths = vec![PathBuf::from("README.md"), PathBuf::from("CONTRIBUTING.md")];
    paths.extend(below("docs", "md"));
    paths.into_iter().map(Page::read).collect()
}

/// Returns all pages, including those next to the code.
pub(crate) fn all() -> Vec<Page> {
    let mut pages = guide();
    let others = ["ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md"].map(PathBuf::from).into_iter();
    pages.extend(others.chain(below("deploy", "md")).chain(below("crates", "md")).map(Page::read));
    pages
}

/// Returns the files with this extension in a directory and its subdirectories, relative to the root.
pub(crate) fn below(directory: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![PathBuf::from(directory)];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root().join(&directory)).unwrap() {
            let entry = entry.unwrap();
            let path = directory.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

impl Page {
    pub(crate) fn read(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let text = fs::read_to_string(root().join(&path));
        let text = text.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { path, text }
    }

    /// Returns the path and line of a block.
    pub(crate) fn place(&self, block: &Block) -> String {
        format!("{}:{}", self.path.display(), block.line)
    }

    fn events(&self) -> impl Iterator<Item = (Event<'_>, std::ops::Range<usize>)> {
        Parser::new_ext(&self.text, Options::ENABLE_TABLES).into_offset_iter()
    }

    fn line_at(&self, offset: usize) -> usize {
        self.text[..offset].lines().count().max(1) + usize::from(self.text[..offset].ends_with('\n'))
    }

    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let (mut comment, mut comment_end) = (String::new(), 0);
        let mut open: Option<Block> = None;
        for (event, range) in self.events() {
            match event {
                Event::Start(Tag::HtmlBlock) => comment.clear(),
                Event::Html(html) => {
                    comment.push_str(&html);
                    comment_end = range.end;
                }
                Event::Start(Tag::CodeBlock(kind)) => {
                    let is_marked = self.text[comment_end..range.start].trim().is_empty();
                    let mark = if is_marked { Mark::of(&comment) } else { Mark::None };
                    let (language, fence) = match kind {
                        CodeBlockKind::Fenced(info) => (info.trim().to_owned(), 1),
                        CodeBlockKind::Indented => (String::new(), 0),
                    };
                    let line = self.line_at(range.start) + fence;
                    open = Some(Block { line, language, text: String::new(), mark });
                }
                Event::Text(text) => {
                    if let Some(block) = &mut open {
                        block.text.push_str(&text);
                    }
                }
                Event::End(TagEnd::CodeBlock) => blocks.extend(open.take()),
                _ => {}
            }
        }
        blocks
    }

    /// Returns the links and images, also those of HTML elements.
    pub(crate) fn links(&self) -> Vec<Link> {
        static ATTRIBUTE: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(r#"\b(?:href|src)="([^"]*)""#).unwrap());
        let mut links = Vec::new();
        for (event, range) in self.events() {
            let targets = match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    vec![dest_url.into_string()]
                }
                Event::Html(html) | Event::InlineHtml(html) => {
                    ATTRIBUTE.captures_iter(&html).map(|found| found[1].to_owned()).collect()
                }
                _ => continue,
            };
            let line = self.line_at(range.start);
            links.extend(targets.into_iter().map(|target| Link { line, target }));
        }
        links
    }

    /// Returns the number of headings of the first level.
    pub(crate) fn titles(&self) -> usize {
        let is_title =
            |event: &Event<'_>| matches!(event, Event::Start(Tag::Heading { level: HeadingLevel::H1, .. }));
        self.events().filter(|(event, _)| is_title(event)).count()
    }

    /// Returns the code spans with their lines.
    pub(crate) fn code_spans(&self) -> Vec<(usize, String)> {
        let code = |(event, range): (Event<'_>, std::ops::Range<usize>)| match event {
            Event::Code(text) => Some((self.line_at(range.start), text.into_string())),
            _ => None,
        };
        self.events().filter_map(code).collect()
    }

    /// Returns the anchors of the headings, in the format of GitHub and mdBook.
    pub(crate) fn anchors(&self) -> Vec<String> {
        let mut anchors: Vec<String> = Vec::new();
        let mut heading: Option<String> = None;
        for (event, _) in self.events() {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::Text(text) | Event::Code(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::End(TagEnd::Heading(_)) => {
                    let anchor = anchor(&heading.take().unwrap_or_default());
                    let same = anchors.iter().filter(|other| **other == anchor).count();
                    anchors.push(if same == 0 { anchor } else { format!("{anchor}-{same}") });
                }
                _ => {}
            }
        }
        anchors
    }
}

impl Mark {
    fn of(comment: &str) -> Self {
        let words = comment.trim().strip_prefix("<!--").and_then(|rest| rest.strip_suffix("-->"));
        match words.and_then(|words| words.trim().split_once(':')) {
            Some(("not run", reason)) => Self::NotRun(reason.trim().to_owned()),
            Some(("file", name)) => Self::File(name.trim().to_owned()),
            _ => Self::None,
        }
    }
}

fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn a_comment_marks_only_the_block_below_it() {
    let text = "# One `two`: three\n\n<!-- not run: needs Docker -->\n```sh\na\n```\n\n```toml\nb\n```\n\nword\n\n    c\n";
    let page = Page { path: PathBuf::new(), text: text.to_owned() };
    let blocks = page.blocks();
    let found: Vec<_> =
        blocks.iter().map(|block| (block.line, &*block.language, block.text.trim())).collect();
    assert_eq!(found, [(5, "sh", "a"), (9, "toml", "b"), (14, "", "c")]);
    assert_eq!(blocks[0].mark, Mark::NotRun("needs Docker".to_owned()));
    assert_eq!(blocks[1].mark, Mark::None);
    assert_eq!(page.anchors(), ["one-two-three"]);
}
