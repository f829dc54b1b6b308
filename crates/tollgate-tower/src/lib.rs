//! tollgate for services that speak HTTP or gRPC.
//!
//! * [`headers`]: a decision as response fields, in the dialect that clients know
//! * [`client`]: whose request it is, when proxies stand in between

pub mod client;
pub mod headers;
