//! The part of RocksDB's interface that limitador's disk storage refers to. Opening a database always fails, so no
//! other function is ever called; limitador's Redis storage does not use it.

use std::{fmt, marker::PhantomData, path::Path};

/// A type without values.
enum Never {}

pub type DB = DBWithThreadMode<MultiThreaded>;

pub struct DBWithThreadMode<Mode> {
    never: Never,
    mode: PhantomData<Mode>,
}

pub struct MultiThreaded;

impl<Mode> DBWithThreadMode<Mode> {
    pub fn open(_: &Options, _: impl AsRef<Path>) -> Result<Self, Error> {
        Err(Error)
    }

    pub fn get(&self, _: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>, Error> {
        match self.never {}
    }

    pub fn delete(&self, _: impl AsRef<[u8]>) -> Result<(), Error> {
        match self.never {}
    }

    pub fn merge(&self, _: impl AsRef<[u8]>, _: impl AsRef<[u8]>) -> Result<(), Error> {
        match self.never {}
    }

    pub fn iterator(&self, _: IteratorMode) -> Entries {
        match self.never {}
    }

    pub fn prefix_iterator(&self, _: impl AsRef<[u8]>) -> Entries {
        match self.never {}
    }
}

pub struct Entries(Never);

impl Iterator for Entries {
    type Item = Result<(Box<[u8]>, Box<[u8]>), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.0 {}
    }
}

pub enum IteratorMode {
    Start,
}

pub enum DBCompressionType {
    Bz2,
    None,
}

pub enum CompactionDecision {
    Keep,
    Remove,
}

#[derive(Default)]
pub struct Options;

impl Options {
    pub fn create_if_missing(&mut self, _: bool) {}

    pub fn set_compression_type(&mut self, _: DBCompressionType) {}

    pub fn set_compaction_filter(
        &mut self,
        _: impl AsRef<str>,
        _: impl FnMut(u32, &[u8], &[u8]) -> CompactionDecision + Send + 'static,
    ) {
    }

    pub fn set_merge_operator_associative(
        &mut self,
        _: impl AsRef<str>,
        _: impl Fn(&[u8], Option<&[u8]>, &Operands) -> Option<Vec<u8>> + Clone + 'static,
    ) {
    }
}

pub struct Operands(Never);

impl<'a> IntoIterator for &'a Operands {
    type Item = &'a [u8];
    type IntoIter = std::iter::Empty<&'a [u8]>;

    fn into_iter(self) -> Self::IntoIter {
        match self.0 {}
    }
}

#[derive(Debug)]
pub struct Error;

impl Error {
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::NotSupported
    }
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("the bench is built without RocksDB")
    }
}

impl std::error::Error for Error {}

#[derive(PartialEq, Eq)]
pub enum ErrorKind {
    NotSupported,
    TimedOut,
    TryAgain,
}
