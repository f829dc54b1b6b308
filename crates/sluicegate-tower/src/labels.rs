//! Reads the labels of a request from its head.

use std::{borrow::Cow, net::IpAddr, sync::Arc};

use http::{HeaderName, header::HOST, request::Parts};
#[cfg(feature = "toml")]
use sluicegate::label_policy::CleanError;
use sluicegate::{Labels, labels::LabelError};

use crate::{client::ClientAddress, denial::CheckError, layer::LayerSettings, target};

type Read<V> = Arc<dyn Fn(&Parts) -> Option<V> + Send + Sync>;

/// A label and the source of its value.
#[derive(Clone)]
pub(crate) struct LabelSpec {
    pub(crate) name: Cow<'static, str>,
    pub(crate) source: LabelSource,
}

/// The source of a label's value.
#[derive(Clone)]
pub(crate) enum LabelSource {
    ClientIp { client: ClientAddress, peer: Read<IpAddr> },
    Header(HeaderName),
    Method,
    Path,
    Host,
    Custom(Read<Vec<u8>>),
}

/// Reads the labels of a request. A label without a value is absent.
pub(crate) fn read(settings: &LayerSettings, request: &Parts) -> Result<Labels, CheckError> {
    let mut pairs = Vec::with_capacity(settings.labels.len());
    for label in &settings.labels {
        if let Some(value) = label.source.value(request)? {
            pairs.push((&*label.name, value));
        }
    }
    #[cfg(feature = "toml")]
    if let Some(policy) = &settings.label_policy {
        return policy.clean(pairs).map_err(|error| match error {
            CleanError::Label(error) => invalid(&error),
            other => CheckError::BadRequest(other.to_string()),
        });
    }
    Labels::new(pairs).map_err(|error| invalid(&error))
}

fn invalid(error: &LabelError) -> CheckError {
    match error {
        LabelError::ValueTooLong { .. } => CheckError::BadRequest(error.to_string()),
        _ => CheckError::Misconfigured(error.to_string()),
    }
}

impl LabelSource {
    fn value(&self, request: &Parts) -> Result<Option<Vec<u8>>, CheckError> {
        Ok(match self {
            Self::ClientIp { client, peer } => {
                // Without an address, limits per address would not apply.
                let peer = peer(request).ok_or_else(|| {
                    CheckError::Misconfigured(
                        "the peer address is unknown: with axum, serve into_make_service_with_connect_info::<SocketAddr>()"
                            .into(),
                    )
                })?;
                Some(client.counted(peer, &request.headers).to_string().into())
            }
            Self::Header(name) => target::single(&request.headers, name.as_str())?.map(<[u8]>::to_vec),
            Self::Method => Some(target::truncate(request.method.as_str().as_bytes()).into()),
            Self::Path => Some(target::truncate(request.uri.path().as_bytes()).into()),
            Self::Host => host(request)?,
            Self::Custom(read) => read(request),
        })
    }
}

/// The host in the target or the `host` header. They must agree, because the inner service could use either.
fn host(request: &Parts) -> Result<Option<Vec<u8>>, CheckError> {
    let in_target = request.uri.host().map(|host| target::host(host.as_bytes()));
    let in_header = target::single(&request.headers, HOST.as_str())?.map(target::host);
    match (in_target, in_header) {
        (Some(one), Some(other)) if one != other => Err(CheckError::BadRequest(
            "the target and the header host have different hosts: send one host".into(),
        )),
        (one, other) => Ok(one.or(other)),
    }
}
