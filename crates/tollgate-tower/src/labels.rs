//! What a request says about itself, from its head.

use std::{borrow::Cow, net::IpAddr, sync::Arc};

use http::{HeaderName, header::HOST, request::Parts};
use tollgate::{LabelError, Labels};

use crate::{asked, client::ClientAddress, refusal::Mistake};

type Read<V> = Arc<dyn Fn(&Parts) -> Option<V> + Send + Sync>;

/// One label: its name and where its value is found.
#[derive(Clone)]
pub(crate) struct Label {
    pub(crate) name: Cow<'static, str>,
    pub(crate) source: Source,
}

/// Where the value of a label is found.
#[derive(Clone)]
pub(crate) enum Source {
    ClientIp { client: ClientAddress, peer: Read<IpAddr> },
    Header(HeaderName),
    Method,
    Path,
    Host,
    Custom(Read<Vec<u8>>),
}

/// The labels of a request. One that its source does not have is absent.
pub(crate) fn read(labels: &[Label], request: &Parts) -> Result<Labels, Mistake> {
    let mut pairs = Vec::with_capacity(labels.len());
    for label in labels {
        if let Some(value) = label.source.value(request)? {
            pairs.push((&*label.name, value));
        }
    }
    Labels::new(pairs).map_err(|error| match error {
        LabelError::ValueTooLong { .. } => Mistake::OfCaller(error.to_string()),
        _ => Mistake::Ours(error.to_string()),
    })
}

impl Source {
    fn value(&self, request: &Parts) -> Result<Option<Vec<u8>>, Mistake> {
        Ok(match self {
            Self::ClientIp { client, peer } => {
                // Without it, limits for each address would apply to nobody.
                let peer = peer(request).ok_or_else(|| {
                    Mistake::Ours(
                        "the address that connected is not known: see RateLimitLayer::client_ip".into(),
                    )
                })?;
                Some(client.counted(peer, &request.headers).to_string().into())
            }
            Self::Header(name) => asked::single(&request.headers, name.as_str())?.map(<[u8]>::to_vec),
            Self::Method => Some(asked::cut(request.method.as_str().as_bytes()).into()),
            Self::Path => Some(asked::cut(request.uri.path().as_bytes()).into()),
            Self::Host => host(request)?,
            Self::Custom(read) => read(request),
        })
    }
}

/// The host that is asked for, by the target or by the header: of two, the service within might take the other.
fn host(request: &Parts) -> Result<Option<Vec<u8>>, Mistake> {
    let of_target = request.uri.host().map(|host| asked::host(host.as_bytes()));
    let of_header = asked::single(&request.headers, HOST.as_str())?.map(asked::host);
    match (of_target, of_header) {
        (Some(one), Some(other)) if one != other => {
            Err(Mistake::OfCaller("the target and the header host name different hosts: name one".into()))
        }
        (one, other) => Ok(one.or(other)),
    }
}
