//! Envoy's messages, generated from `proto/`: see the README there.

/// The descriptors of the service, for reflection.
pub(super) const DESCRIPTORS: &[u8] = include_bytes!("generated/descriptors.bin");

/// The packages, with the module paths that the generated code expects.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod envoy {
    pub mod config {
        pub mod core {
            pub mod v3 {
                include!("generated/envoy.config.core.v3.rs");
            }
        }
    }
    pub mod extensions {
        pub mod common {
            pub mod ratelimit {
                pub mod v3 {
                    include!("generated/envoy.extensions.common.ratelimit.v3.rs");
                }
            }
        }
    }
    pub mod r#type {
        pub mod v3 {
            include!("generated/envoy.r#type.v3.rs");
        }
    }
    pub mod service {
        pub mod ratelimit {
            pub mod v3 {
                include!("generated/envoy.service.ratelimit.v3.rs");
            }
        }
    }
}

pub use envoy::{
    config::core::v3::HeaderValue,
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor},
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit},
        rate_limit_service_client, rate_limit_service_server,
    },
    r#type::v3::RateLimitUnit,
};
