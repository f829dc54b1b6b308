//! IP addresses and networks in requests and settings. An IPv4 address or network written as IPv6 (`::ffff:192.0.2.1`) counts as IPv4.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

/// The longest text of an address: IPv6 with an IPv4 tail.
const MAX_ADDRESS: usize = 45;
/// Number of bits before the IPv4 address in an IPv4-mapped IPv6 address.
const MAPPED_PREFIX: u8 = 96;

/// Parses an address.
pub fn parse(text: &[u8]) -> Option<IpAddr> {
    if text.len() > MAX_ADDRESS {
        return None;
    }
    let text = std::str::from_utf8(text).ok()?;
    if let Ok(v4) = text.parse::<Ipv4Addr>() {
        return Some(IpAddr::V4(v4));
    }
    text.parse::<Ipv6Addr>().ok().map(|v6| IpAddr::V6(v6).to_canonical())
}

/// Parses a network such as `10.0.0.0/8`, or a single address. Host bits are ignored.
pub fn parse_network(text: &str) -> Option<IpNet> {
    let network = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    network.ok().map(canonical_network)
}

/// Returns the network without host bits, and as IPv4 if it is IPv4-mapped.
pub fn canonical_network(network: IpNet) -> IpNet {
    let network = network.trunc();
    let mapped = match network {
        IpNet::V6(v6) if v6.prefix_len() >= MAPPED_PREFIX => v6.network().to_ipv4_mapped(),
        _ => None,
    };
    let v4 = mapped.and_then(|v4| Ipv4Net::new(v4, network.prefix_len() - MAPPED_PREFIX).ok());
    v4.map_or(network, IpNet::V4)
}

/// Returns the first address of the network of `prefix` bits around an IPv6 address. An IPv4 address is returned unchanged.
pub fn mask_ipv6(address: IpAddr, prefix: u8) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let host_bits = 128 - u32::from(prefix.min(128));
            let mask = u128::MAX.checked_shl(host_bits).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_networks_are_ipv4_and_host_bits_are_removed() {
        for (text, expected) in [
            ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
            ("::ffff:10.1.2.3", "10.1.2.3/32"),
            ("10.9.9.9/8", "10.0.0.0/8"),
            ("2001:db8::1/32", "2001:db8::/32"),
            ("::/95", "::/95"),
        ] {
            assert_eq!(
                parse_network(text).map(|network| network.to_string()),
                Some(expected.to_owned()),
                "{text}"
            );
        }
        assert_eq!(parse_network("localhost"), None);
    }

    #[test]
    fn only_ipv6_is_masked() {
        let mask = |text: &str, prefix| mask_ipv6(text.parse().unwrap(), prefix).to_string();
        assert_eq!(mask("2001:db8:1:2:3::4", 64), "2001:db8:1:2::");
        assert_eq!(mask("2001:db8::4", 0), "::");
        assert_eq!(mask("203.0.113.9", 64), "203.0.113.9");
        assert_eq!(mask("::ffff:203.0.113.9", 64), "203.0.113.9");
    }
}
