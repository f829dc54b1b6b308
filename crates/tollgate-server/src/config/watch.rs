//! The configuration again, when a file changes or somebody asks.
