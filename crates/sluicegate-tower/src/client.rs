//! The client's address: the peer of the connection, or the address reported by trusted proxies.
//!
//! Any client can send `X-Forwarded-For` and `Forwarded`, so both are ignored unless the connection comes from a trusted
//! proxy. Each proxy appends the address it received the request from, so the hops are read from right to left up to the
//! first that is not a trusted proxy: this is the client. Reading also stops at a hop that is not an address (`unknown`,
//! `_hidden`, garbage); the client is then the last proxy before it.
//!
//! **Both headers present:** a proxy maintains one of them and often forwards the other unchanged from the client. Which one is
//! unknown, so both must lead to the same client; if they differ, the peer is used. Proxies should remove the header
//! that they do not maintain; otherwise select one with [`ClientAddress::trusting_header`].
//!
//! An IPv6 subscriber owns at least a /64 and can use each of its addresses: [`ClientAddress::counted`] treats them as one
//! client.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use http::{HeaderMap, HeaderName, header::FORWARDED};
use ipnet::IpNet;
use sluicegate::address;

/// Default number of leading IPv6 bits that identify a client.
pub const DEFAULT_IPV6_PREFIX: u8 = 64;

/// Maximum number of hops that are followed; a longer chain of trusted proxies is a loop.
pub const MAX_HOPS: usize = 32;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Determines the client's address of a connection.
///
/// ```
/// use http::HeaderMap;
/// use sluicegate_tower::client::ClientAddress;
///
/// let client = ClientAddress::trusting(["10.0.0.0/8"])?;
/// let mut headers = HeaderMap::new();
/// headers.insert("x-forwarded-for", "192.0.2.7, 203.0.113.9, 10.1.2.3".parse()?);
///
/// // the trusted proxies report 203.0.113.9; the client itself sent the rest
/// assert_eq!(client.of("10.0.0.1".parse()?, &headers).to_string(), "203.0.113.9");
/// // headers from other peers are ignored
/// assert_eq!(client.of("198.51.100.4".parse()?, &headers).to_string(), "198.51.100.4");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientAddress {
    trusted: Vec<IpNet>,
    header: ForwardedHeader,
    ipv6_prefix: u8,
}

/// The header that lists the hops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardedHeader {
    /// Either header; if both are present, they must agree.
    #[default]
    Either,
    /// `X-Forwarded-For`.
    XForwardedFor,
    /// `Forwarded` (RFC 7239).
    Forwarded,
}

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The text is not a network.
    #[error("trusted proxy {0:?} is not a network: use an address or a network, for example \"10.0.0.0/8\"")]
    Network(String),
    /// The prefix length is out of range.
    #[error("ipv6_prefix {0} is out of range: use 1 to 128, for example {DEFAULT_IPV6_PREFIX}")]
    Prefix(u8),
}

impl Default for ClientAddress {
    fn default() -> Self {
        Self { trusted: Vec::new(), header: ForwardedHeader::default(), ipv6_prefix: DEFAULT_IPV6_PREFIX }
    }
}

impl ClientAddress {
    /// Trusts the proxies in these networks. Without networks, the peer is always the client.
    ///
    /// # Errors
    /// If a text is not a network.
    pub fn trusting<N: AsRef<str>>(networks: impl IntoIterator<Item = N>) -> Result<Self, ClientError> {
        let networks = networks.into_iter().map(|text| network(text.as_ref()));
        networks.collect::<Result<Vec<_>, _>>().map(Self::trusting_networks)
    }

    /// As [`ClientAddress::trusting`], with parsed networks.
    pub fn trusting_networks(networks: impl IntoIterator<Item = IpNet>) -> Self {
        Self { trusted: networks.into_iter().map(address::canonical_network).collect(), ..Self::default() }
    }

    /// Uses only this header.
    #[must_use]
    pub fn trusting_header(self, header: ForwardedHeader) -> Self {
        Self { header, ..self }
    }

    /// Sets the number of leading IPv6 bits that identify a client.
    ///
    /// # Errors
    /// If the number is not 1 to 128.
    pub fn with_ipv6_prefix(self, bits: u8) -> Result<Self, ClientError> {
        match bits {
            1..=128 => Ok(Self { ipv6_prefix: bits, ..self }),
            _ => Err(ClientError::Prefix(bits)),
        }
    }

    /// Returns the client's address; IPv4-mapped IPv6 is converted to IPv4.
    pub fn of(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let peer = peer.to_canonical();
        if !self.trusts(peer) {
            return peer;
        }
        let x_forwarded_for = || self.walk(peer, lines(headers, &X_FORWARDED_FOR).map(x_forwarded_hops));
        let forwarded = || self.walk(peer, lines(headers, &FORWARDED).map(forwarded_hops));
        let found = match self.header {
            ForwardedHeader::XForwardedFor => x_forwarded_for(),
            ForwardedHeader::Forwarded => forwarded(),
            ForwardedHeader::Either => match (x_forwarded_for(), forwarded()) {
                (Some(one), Some(other)) => (one == other).then_some(one),
                (one, other) => one.or(other),
            },
        };
        found.unwrap_or(peer)
    }

    /// Returns the address to count by; for IPv6, the first address of the client's network.
    pub fn counted(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        address::mask_ipv6(self.of(peer, headers), self.ipv6_prefix)
    }

    /// Whether an address is a trusted proxy.
    pub fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.trusted.iter().any(|network| network.contains(&address))
    }

    /// Follows the hops from right to left, starting behind the trusted peer. Returns `None` without hops.
    fn walk(&self, peer: IpAddr, hops: Option<Vec<Option<IpAddr>>>) -> Option<IpAddr> {
        let mut client = peer;
        for hop in hops?.into_iter().rev().take(MAX_HOPS) {
            let Some(address) = hop else { break };
            client = address;
            if !self.trusts(address) {
                break;
            }
        }
        Some(client)
    }
}

fn network(text: &str) -> Result<IpNet, ClientError> {
    address::parse_network(text).ok_or_else(|| ClientError::Network(text.to_owned()))
}

/// Joins all lines of a header. Invalid UTF-8 becomes a character that is not valid in a hop.
fn lines(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let lines = headers.get_all(name);
    let lines: Vec<_> = lines.iter().map(|line| String::from_utf8_lossy(line.as_bytes())).collect();
    (!lines.is_empty()).then(|| lines.join(","))
}

fn x_forwarded_hops(field: String) -> Vec<Option<IpAddr>> {
    field.split(',').map(|hop| hop_address(hop.trim_matches([' ', '\t']))).collect()
}

/// The hops of `Forwarded`. An invalid header yields no hops: otherwise a client could send an unbalanced quotation
/// mark to absorb the element that the proxy appends.
fn forwarded_hops(field: String) -> Vec<Option<IpAddr>> {
    let mut rest = field.as_str();
    let mut hops = Vec::new();
    loop {
        match element(rest) {
            Some((hop, after)) => {
                hops.push(hop);
                match after.strip_prefix(',') {
                    Some(more) => rest = more,
                    None if after.is_empty() => return hops,
                    None => return Vec::new(),
                }
            }
            None => return Vec::new(),
        }
    }
}

/// Parses one element, `for=192.0.2.1;proto=https`. Returns its hop and the rest of the text. The hop is `None` if it is not an
/// address or not given exactly once.
fn element(text: &str) -> Option<(Option<IpAddr>, &str)> {
    let mut hops = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t']);
        if !rest.starts_with([',', ';']) && !rest.is_empty() {
            let (name, after) = token(rest)?;
            let (value, after) = value(after.strip_prefix('=')?)?;
            if name.eq_ignore_ascii_case("for") {
                hops.push(hop_address(&value));
            }
            rest = after.trim_start_matches([' ', '\t']);
        }
        match rest.strip_prefix(';') {
            Some(more) => rest = more,
            None => break,
        }
    }
    let hop = if let [hop] = hops[..] { hop } else { None };
    Some((hop, rest))
}

/// Parses a token or quoted string. Returns it and the rest of the text.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        return token(text).map(|(token, rest)| (token.to_owned(), rest));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            _ => value.push(character),
        }
    }
    None
}

/// Parses a token. Returns it and the rest of the text. Accepts `:` and brackets, because addresses with a port are often
/// not quoted.
fn token(text: &str) -> Option<(&str, &str)> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~:[]".contains(c);
    let (token, rest) = text.split_at(text.find(|c| !fits(c)).unwrap_or(text.len()));
    (!token.is_empty()).then_some((token, rest))
}

/// Parses an address with optional port and brackets.
fn hop_address(hop: &str) -> Option<IpAddr> {
    let bracketed = || Ipv6Addr::from_str(hop.strip_prefix('[')?.strip_suffix(']')?).ok().map(IpAddr::V6);
    let with_port = || hop.parse::<SocketAddr>().ok().map(|address| address.ip());
    let address = hop.parse().ok().or_else(bracketed).or_else(with_port)?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PROXY: &str = "10.0.0.1";

    fn headers(fields: &[(&str, &[u8])]) -> HeaderMap {
        let pairs = fields.iter().map(|(name, value)| {
            (HeaderName::try_from(*name).unwrap(), http::HeaderValue::from_bytes(value).unwrap())
        });
        let mut headers = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            headers.append(name, value);
        });
        headers
    }

    fn behind_proxies() -> ClientAddress {
        ClientAddress::trusting(["10.0.0.0/8", "2001:db8:ffff::/48", "192.0.2.1"]).unwrap()
    }

    fn seen(peer: &str, fields: &[(&str, &[u8])]) -> String {
        behind_proxies().of(peer.parse().unwrap(), &headers(fields)).to_string()
    }

    #[test]
    fn without_trusted_proxies_the_peer_is_the_client_regardless_of_its_headers() {
        let forged = headers(&[("x-forwarded-for", b"203.0.113.9"), ("forwarded", b"for=203.0.113.9")]);
        for peer in ["198.51.100.4", "10.0.0.1", "127.0.0.1", "::1"] {
            let found = ClientAddress::default().of(peer.parse().unwrap(), &forged);
            assert_eq!(found.to_string(), peer);
        }
        assert_eq!(seen("198.51.100.4", &[("x-forwarded-for", b"203.0.113.9")]), "198.51.100.4");
    }

    #[test]
    fn x_forwarded_for_is_followed_to_the_first_untrusted_hop() {
        let table: [(&[u8], &str); 21] = [
            (b"203.0.113.9", "203.0.113.9"),
            (b"1.1.1.1, 203.0.113.9", "203.0.113.9"),
            (b"10.9.9.9, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
            (b"1.1.1.1,203.0.113.9,10.0.0.3,  10.0.0.2", "203.0.113.9"),
            (b"10.0.0.3, 10.0.0.2", "10.0.0.3"),
            (b"203.0.113.9:4711", "203.0.113.9"),
            (b"2001:db8::7", "2001:db8::7"),
            (b"[2001:db8::7]", "2001:db8::7"),
            (b"[2001:db8::7]:443, [2001:db8:ffff::1]:443", "2001:db8::7"),
            (b"::ffff:203.0.113.9", "203.0.113.9"),
            (b"203.0.113.9, ::ffff:10.0.0.2", "203.0.113.9"),
            // a hop that is not an address ends at the proxy that forwarded it
            (b"", PROXY),
            (b"unknown", PROXY),
            (b"_hidden", PROXY),
            (b"1.1.1.1, garbage, 10.0.0.2", "10.0.0.2"),
            (b"1.1.1.1, , 10.0.0.2", "10.0.0.2"),
            (b"1.1.1.1, 10.0.0.2,", PROXY),
            (b"203.0.113.009", PROXY),
            (b"fe80::1%eth0", PROXY),
            (b"203.0.113.9:99999", PROXY),
            (b"1.1.1.1, \xff\xfe", PROXY),
        ];
        for (field, client) in table {
            assert_eq!(seen(PROXY, &[("x-forwarded-for", field)]), client, "{}", field.escape_ascii());
        }
    }

    #[test]
    fn forwarded_is_followed_in_the_same_way() {
        let table: [(&[u8], &str); 20] = [
            (b"for=203.0.113.9", "203.0.113.9"),
            (b"For=203.0.113.9;proto=https;by=10.0.0.1", "203.0.113.9"),
            (b"proto=http; for=\"203.0.113.9:80\" ;host=\"a,b;c\"", "203.0.113.9"),
            (b"for=1.1.1.1, for=203.0.113.9, for=10.0.0.2", "203.0.113.9"),
            (b"for=\"[2001:db8::7]:4711\"", "2001:db8::7"),
            (b"for=\"[2001:db8::7]\", for=10.0.0.2", "2001:db8::7"),
            (b"for=\"\\2\\03.0.113.9\"", "203.0.113.9"),
            (b"for=1.1.1.1;, for=203.0.113.9", "203.0.113.9"),
            (b"for=203.0.113.9:80", "203.0.113.9"),
            // a hop that is not an address
            (b"for=unknown", PROXY),
            (b"for=_hidden, for=10.0.0.2", "10.0.0.2"),
            (b"for=\"_a:_b\"", PROXY),
            (b"proto=https", PROXY),
            (b"for=203.0.113.9;for=203.0.113.9", PROXY),
            // a client that tries to absorb the proxy's element
            (b"for=\", for=203.0.113.9", PROXY),
            (b"for=1.1.1.1;x=\", for=\"203.0.113.9\"", PROXY),
            (b"for=\"1.1.1.1\\, for=203.0.113.9", PROXY),
            (b"for=1.1.1.1 for=203.0.113.9", PROXY),
            (b"for 1.1.1.1", PROXY),
            (b"", PROXY),
        ];
        for (field, client) in table {
            assert_eq!(seen(PROXY, &[("forwarded", field)]), client, "{}", field.escape_ascii());
        }
    }

    #[test]
    fn several_lines_are_one_header() {
        let lines: &[(&str, &[u8])] =
            &[("x-forwarded-for", b"1.1.1.1"), ("x-forwarded-for", b"203.0.113.9, 10.0.0.2")];
        assert_eq!(seen(PROXY, lines), "203.0.113.9");
        let lines: &[(&str, &[u8])] =
            &[("forwarded", b"for=1.1.1.1;x=\""), ("forwarded", b"for=203.0.113.9")];
        assert_eq!(
            seen(PROXY, lines),
            PROXY,
            "an open quotation mark in one line does not extend to the next"
        );
    }

    #[test]
    fn headers_that_disagree_are_ignored_unless_one_is_selected() {
        let agreeing: &[(&str, &[u8])] =
            &[("x-forwarded-for", b"1.1.1.1, 203.0.113.9"), ("forwarded", b"for=203.0.113.9")];
        assert_eq!(seen(PROXY, agreeing), "203.0.113.9");
        let forged: &[(&str, &[u8])] = &[("x-forwarded-for", b"203.0.113.9"), ("forwarded", b"for=1.1.1.1")];
        assert_eq!(seen(PROXY, forged), PROXY);
        let table =
            [(ForwardedHeader::XForwardedFor, "203.0.113.9"), (ForwardedHeader::Forwarded, "1.1.1.1")];
        for (header, client) in table {
            let found = behind_proxies().trusting_header(header).of(PROXY.parse().unwrap(), &headers(forged));
            assert_eq!(found.to_string(), client);
        }
    }

    #[test]
    fn the_number_of_followed_hops_is_limited() {
        let chain = |hops: usize| format!("203.0.113.9{}", ", 10.0.0.2".repeat(hops));
        assert_eq!(seen(PROXY, &[("x-forwarded-for", chain(MAX_HOPS - 1).as_bytes())]), "203.0.113.9");
        assert_eq!(seen(PROXY, &[("x-forwarded-for", chain(MAX_HOPS).as_bytes())]), "10.0.0.2");
    }

    #[test]
    fn a_peer_on_a_dual_stack_socket_is_its_ipv4_address() {
        assert_eq!(seen("::ffff:10.0.0.1", &[("x-forwarded-for", b"203.0.113.9")]), "203.0.113.9");
        assert_eq!(seen("::ffff:198.51.100.4", &[]), "198.51.100.4");
        let mapped = ClientAddress::trusting(["::ffff:10.0.0.0/104"]).unwrap();
        assert_eq!(mapped, ClientAddress::trusting(["10.0.0.0/8"]).unwrap());
    }

    #[test]
    fn ipv6_clients_are_counted_by_their_network() {
        let none = HeaderMap::new();
        let counted =
            |client: &ClientAddress, peer: &str| client.counted(peer.parse().unwrap(), &none).to_string();
        let default = ClientAddress::default();
        assert_eq!(counted(&default, "2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(counted(&default, "203.0.113.9"), "203.0.113.9");
        assert_eq!(counted(&default, "::ffff:203.0.113.9"), "203.0.113.9");
        let table = [(1, "::"), (48, "2001:db8:1::"), (56, "2001:db8:1::"), (128, "2001:db8:1:2:3:4:5:6")];
        for (bits, network) in table {
            let client = ClientAddress::default().with_ipv6_prefix(bits).unwrap();
            assert_eq!(counted(&client, "2001:db8:1:2:3:4:5:6"), network);
        }
        for bits in [0, 129, 255] {
            assert_eq!(ClientAddress::default().with_ipv6_prefix(bits), Err(ClientError::Prefix(bits)));
        }
    }

    #[test]
    fn invalid_networks_are_rejected() {
        for text in ["", "10.0.0.0/33", "localhost", "10.0.0", "10.0.0.0/8 "] {
            assert_eq!(ClientAddress::trusting([text]), Err(ClientError::Network(text.into())));
        }
    }

    proptest! {
        #[test]
        fn a_client_cannot_change_the_address_reported_by_its_proxy(forged in "[ -~\\t]{0,40}") {
            let appended = format!("{forged}, 203.0.113.9");
            prop_assert_eq!(seen(PROXY, &[("x-forwarded-for", appended.trim().as_bytes())]), "203.0.113.9");
            for own in ["for=203.0.113.9", "for=\"203.0.113.9:80\";by=_x", "proto=http;for=\"203.0.113.9\""] {
                let appended = format!("{forged}, {own}");
                let found = seen(PROXY, &[("forwarded", appended.trim().as_bytes())]);
                prop_assert!(found == "203.0.113.9" || found == PROXY, "{appended:?}: {found}");
            }
        }
    }
}
