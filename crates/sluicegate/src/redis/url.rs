//! Parses store URLs: topology, servers and credentials.
//!
//! A URL may contain a password, so no error repeats any part of it.

use std::fmt;

use super::{
    RedisSetupError,
    settings::{Credentials, Secret},
};

/// The URL schemes of a [`RedisStore`](super::RedisStore).
pub const SCHEMES: [&str; 6] =
    ["redis", "rediss", "redis-sentinel", "rediss-sentinel", "redis-cluster", "rediss-cluster"];

/// The largest number of servers in a URL.
pub(super) const MAX_HOSTS: usize = 64;

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// One server, by name or address.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Node {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Node {
    /// Returns a number for the node, not 0. Nodes with equal numbers share a queue and a circuit breaker.
    pub(super) fn number(&self) -> u64 {
        u64::from(crc32fast::hash(self.host.as_bytes())) << 16 | u64::from(self.port.max(1))
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// A parsed URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) topology: UrlTopology,
    pub(super) is_tls: bool,
    /// The server, the sentinels, or some nodes of the Cluster; never empty.
    pub(super) nodes: Vec<Node>,
    pub(super) credentials: Credentials,
    pub(super) database: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UrlTopology {
    Standalone,
    /// The primary of this name, as reported by its sentinels.
    Sentinel {
        name: String,
    },
    Cluster,
}

pub(super) fn parse(url: &str) -> Result<Address, RedisSetupError> {
    try_parse(url).map_err(|reason| RedisSetupError::Url(reason.to_owned()))
}

fn try_parse(url: &str) -> Result<Address, &'static str> {
    let (scheme, rest) = url.split_once("://").ok_or("the URL has no scheme")?;
    let (is_tls, topology) = match scheme {
        "redis" => (false, UrlTopology::Standalone),
        "rediss" => (true, UrlTopology::Standalone),
        "redis-sentinel" => (false, UrlTopology::Sentinel { name: String::new() }),
        "rediss-sentinel" => (true, UrlTopology::Sentinel { name: String::new() }),
        "redis-cluster" => (false, UrlTopology::Cluster),
        "rediss-cluster" => (true, UrlTopology::Cluster),
        _ => return Err("unknown URL scheme"),
    };
    // the last `@`: an unescaped password can contain one, hosts and path cannot
    let (credentials, location) = match rest.rsplit_once('@') {
        Some((user_info, location)) => (credentials(user_info)?, location),
        None => (Credentials::default(), rest),
    };
    if location.contains(['?', '#']) {
        return Err("the URL has a query or a fragment, which is not supported");
    }
    let (hosts, path) = location.split_once('/').unwrap_or((location, ""));
    let default_port = if matches!(topology, UrlTopology::Sentinel { .. }) { SENTINEL_PORT } else { PORT };
    let nodes = hosts.split(',').map(|host| node(host, default_port)).collect::<Result<Vec<_>, _>>()?;
    let (topology, database) = match topology {
        UrlTopology::Standalone if nodes.len() > 1 => return Err("the URL names several servers"),
        _ if nodes.len() > MAX_HOSTS => return Err("the URL names too many servers"),
        UrlTopology::Standalone => (topology, database(path)?),
        UrlTopology::Cluster => match database(path)? {
            None | Some(0) => (topology, None),
            Some(_) => return Err("a Cluster has only database 0"),
        },
        UrlTopology::Sentinel { .. } => {
            let (name, path) = path.split_once('/').unwrap_or((path, ""));
            let name = unescape(name)?;
            if name.is_empty() {
                return Err("the URL does not name the primary of the sentinels");
            }
            (UrlTopology::Sentinel { name }, database(path)?)
        }
    };
    Ok(Address { topology, is_tls, nodes, credentials, database })
}

fn credentials(user_info: &str) -> Result<Credentials, &'static str> {
    let (user, password) = user_info.split_once(':').map_or((user_info, None), |(u, p)| (u, Some(p)));
    let user = Some(unescape(user)?).filter(|user| !user.is_empty());
    let password = password.map(unescape).transpose()?.filter(|password| !password.is_empty());
    Ok(Credentials { user, password: password.map(Secret::from) })
}

fn node(text: &str, default_port: u16) -> Result<Node, &'static str> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("an address in brackets is not closed")?;
            (host, port.strip_prefix(':'))
        }
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    if host.is_empty() {
        return Err("a host is empty");
    }
    let port = match port {
        None => default_port,
        Some(port) => port.parse().map_err(|_| "a port is not a number from 0 to 65535")?,
    };
    Ok(Node { host: host.to_owned(), port })
}

fn database(path: &str) -> Result<Option<u32>, &'static str> {
    match path.strip_suffix('/').unwrap_or(path) {
        "" => Ok(None),
        number => number.parse().map(Some).map_err(|_| "the database is not a number"),
    }
}

/// Decodes `%xx` escapes.
fn unescape(text: &str) -> Result<String, &'static str> {
    const INVALID: &str = "a % in the URL is not followed by two hexadecimal digits of UTF-8";
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2).ok_or(INVALID)?;
        let digits = std::str::from_utf8(digits).map_err(|_| INVALID)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| INVALID)?);
        rest = after;
    }
    String::from_utf8(bytes).map_err(|_| INVALID)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: u16) -> Node {
        Node { host: host.to_owned(), port }
    }

    #[test]
    fn every_kind_of_url_is_parsed() {
        let address = parse("redis://h").unwrap();
        assert_eq!(address.nodes, [node("h", 6379)]);
        assert_eq!(
            (address.topology, address.is_tls, address.database),
            (UrlTopology::Standalone, false, None)
        );

        let address = parse("rediss://me:a%40b@[::1]:7/3").unwrap();
        assert_eq!(address.nodes, [node("::1", 7)]);
        assert_eq!(
            (address.topology, address.is_tls, address.database),
            (UrlTopology::Standalone, true, Some(3))
        );
        assert_eq!(address.credentials.user.as_deref(), Some("me"));
        assert_eq!(address.credentials.password, Some(Secret::from("a@b")));

        let address = parse("rediss-sentinel://:p@w@a:1,b/main/2").unwrap();
        assert_eq!(address.nodes, [node("a", 1), node("b", 26379)]);
        assert_eq!(address.topology, UrlTopology::Sentinel { name: "main".to_owned() });
        assert_eq!((address.is_tls, address.database), (true, Some(2)));
        assert_eq!(address.credentials, Credentials { user: None, password: Some(Secret::from("p@w")) });

        let address = parse("redis-cluster://a,b:2/0").unwrap();
        assert_eq!(address.nodes, [node("a", 6379), node("b", 2)]);
        assert_eq!((address.topology, address.is_tls, address.database), (UrlTopology::Cluster, false, None));
    }

    #[test]
    fn errors_show_the_valid_forms_and_never_the_password() {
        let invalid = [
            "s3cret",
            "http://:s3cret@h",
            "redis://:s3cret@",
            "redis://:s3cret@a,b",
            "redis://:s3cret@h/x",
            "redis://:s3cret%4@h",
            "redis://:s3cret@h:port",
            "redis://:s3cret@h?db=1",
            "redis://:s3cret@[::1",
            "redis-sentinel://:s3cret@h",
            "redis-sentinel://:s3cret@h/",
            "redis-cluster://:s3cret@h/1",
        ];
        for url in invalid {
            let error = parse(url).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(!text.contains("s3cret"), "{text}");
            assert!(text.contains("redis-sentinel://[user:password@]host[:port],…/name"), "{text}");
        }
    }
}
