//! Integration tests of the core.

mod properties;
