//! Normalization of labels, with one [`LabelPolicy`] for all front ends.
//!
//! * A label of kind `ip` is brought to its canonical form: IPv4-mapped IPv6 becomes IPv4, and IPv6 is truncated to a network,
//!   since one client has 2^64 addresses or more. The labels in [`ADDRESS_LABELS`] have this kind by default, but then accept
//!   values that are not addresses.
//! * A secret label is replaced by a keyed hash before it is used in a key, a log line or the dashboard.
//! * A label with a header is read from that header by forward-auth.
//!
//! Other labels are not changed.

use std::{borrow::Cow, fmt, net::IpAddr, sync::OnceLock};

use hmac::{Hmac, Mac};
use ipnet::IpNet;
use sha2::{Digest, Sha256};

use crate::{
    address,
    labels::{LabelError, Labels, MAX_LABEL_VALUE},
};

/// Default length of the network that IPv6 addresses are truncated to.
pub const DEFAULT_IPV6_PREFIX: u8 = 64;

const IPV4_BITS: u8 = 32;
pub(crate) const IPV6_BITS: u8 = 128;
/// The length of the prefix of IPv4 addresses in IPv6 notation: `::ffff:0:0/96`.
const MAPPED_PREFIX: u8 = IPV6_BITS - IPV4_BITS;

/// The label with the address of a client.
pub const IP: &str = "ip";

/// The labels with the default kind `ip`. Envoy's rate limit actions send the last two.
pub const ADDRESS_LABELS: [&str; 3] = [IP, "remote_address", "masked_remote_address"];

/// Length of a hash, in bytes: enough to rule out collisions in practice.
const HASH_BYTES: usize = 16;
/// Length of the unchanged prefix of a shortened value, which `#` and a hexadecimal hash follow.
pub const SHORTENED_PREFIX: usize = MAX_LABEL_VALUE - 1 - 2 * HASH_BYTES;

/// How labels are normalized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelPolicy {
    labels: Vec<LabelSettings>,
    secret: HashSecret,
}

/// How one label is normalized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelSettings {
    /// Its name.
    pub name: String,
    /// The kind of its values.
    pub kind: LabelKind,
    /// Number of leading IPv6 bits to keep, for the kind `ip`.
    pub ipv6_prefix: u8,
    /// The header it is read from, in lower case.
    pub header: Option<String>,
    /// Whether its values are hashed.
    pub secret: bool,
    /// Whether a value that is not of its kind is an error; otherwise it is kept unchanged.
    pub strict: bool,
}

/// The kind of a label's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LabelKind {
    /// Any bytes.
    #[default]
    Text,
    /// IP addresses.
    Ip,
}

/// The key that secret labels are hashed with. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct HashSecret(Vec<u8>);

/// Labels are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CleanError {
    /// A name or value is invalid.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// A value of a label of kind `ip` is not an address.
    #[error("label {label:?} is not an IP address: send one, for example \"203.0.113.9\" or \"2001:db8::1\"")]
    NotAnAddress {
        /// The label's name.
        label: String,
    },
}

impl Default for LabelPolicy {
    /// The policy of an empty `[labels]` table.
    fn default() -> Self {
        Self::new(Vec::new(), HashSecret::of_process())
    }
}

impl LabelPolicy {
    /// Creates a policy for these labels, and for those of [`ADDRESS_LABELS`] that are not among them.
    pub fn new(mut labels: Vec<LabelSettings>, secret: HashSecret) -> Self {
        for name in ADDRESS_LABELS {
            if !labels.iter().any(|label| label.name == name) {
                let kind = LabelKind::Ip;
                labels.push(LabelSettings { kind, strict: false, ..LabelSettings::new(name) });
            }
        }
        Self { labels, secret }
    }

    /// The labels with settings.
    pub fn labels(&self) -> &[LabelSettings] {
        &self.labels
    }

    /// The settings of a label, if it has any.
    pub fn label(&self, name: &str) -> Option<&LabelSettings> {
        self.labels.iter().find(|label| label.name == name)
    }

    /// The labels that are read from headers, each with its header in lower case.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        self.labels.iter().filter_map(|label| Some((&*label.name, label.header.as_deref()?)))
    }

    /// Normalizes the labels of a request.
    ///
    /// # Errors
    /// If a label is invalid, or one of kind `ip` is not an address.
    pub fn clean<N, V>(&self, pairs: impl IntoIterator<Item = (N, V)>) -> Result<Labels, CleanError>
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        self.clean_each(pairs, |value| value)
    }

    /// Normalizes the labels of a request and shortens values that are too long. For values from end clients, where
    /// rejecting the request would let it pass unlimited.
    ///
    /// # Errors
    /// As [`LabelPolicy::clean`], but not for long values.
    pub fn clean_shortened<N, V>(&self, pairs: impl IntoIterator<Item = (N, V)>) -> Result<Labels, CleanError>
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        self.clean_each(pairs, |value| match shortened(value.as_ref()) {
            Cow::Borrowed(_) => value,
            Cow::Owned(short) => Cleaned::Changed(short),
        })
    }

    fn clean_each<N, V>(
        &self,
        pairs: impl IntoIterator<Item = (N, V)>,
        fit: impl Fn(Cleaned<V>) -> Cleaned<V>,
    ) -> Result<Labels, CleanError>
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        let mut rejected = None;
        let cleaned = pairs.into_iter().map_while(|(name, value)| {
            match self.label(name.as_ref()).map(|label| self.cleaned(label, value.as_ref())) {
                None | Some(Ok(Cow::Borrowed(_))) => Some((name, fit(Cleaned::Unchanged(value)))),
                Some(Ok(Cow::Owned(other))) => Some((name, fit(Cleaned::Changed(other)))),
                Some(Err(error)) => {
                    rejected = Some(error);
                    None
                }
            }
        });
        let labels = Labels::new(cleaned);
        match rejected {
            Some(error) => Err(error),
            None => Ok(labels?),
        }
    }

    /// Normalizes one value; borrowed if it is unchanged.
    ///
    /// # Errors
    /// If the label has the kind `ip` and the value is not an address.
    pub fn cleaned<'v>(&self, label: &LabelSettings, value: &'v [u8]) -> Result<Cow<'v, [u8]>, CleanError> {
        let value = match label.kind {
            LabelKind::Text => Cow::Borrowed(value),
            LabelKind::Ip => match label.address(value) {
                Some(canonical) => canonical,
                None if label.strict => {
                    return Err(CleanError::NotAnAddress { label: label.name.clone() });
                }
                None => Cow::Borrowed(value),
            },
        };
        Ok(if label.secret { Cow::Owned(self.secret.hash(&label.name, &value)) } else { value })
    }
}

/// Splits a network such as `192.0.2.0/24` into its address and prefix length. Envoy sends `masked_remote_address` like this, with the host
/// bits cleared. Of other values, returns the whole.
fn split_prefix_length(value: &[u8]) -> (&[u8], Option<u8>) {
    let length = |digits: &[u8]| match digits {
        [b'1'..=b'9', ..] | [b'0'] => str::from_utf8(digits).ok()?.parse().ok(),
        _ => None,
    };
    let network = value.iter().rposition(|&byte| byte == b'/').and_then(|slash| {
        let (address, rest) = value.split_at(slash);
        Some((address, length(&rest[1..])?))
    });
    network.map_or((value, None), |(address, length)| (address, Some(length)))
}

impl LabelSettings {
    /// A label whose values are not changed.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: LabelKind::Text,
            ipv6_prefix: DEFAULT_IPV6_PREFIX,
            header: None,
            secret: false,
            strict: true,
        }
    }

    /// The canonical form of an address or a network; `None` if it is neither. Networks of different lengths stay different.
    fn address<'v>(&self, value: &'v [u8]) -> Option<Cow<'v, [u8]>> {
        let (text, length) = split_prefix_length(value);
        let address = address::parse(text)?;
        let is_dotted = !text.contains(&b':');
        // IPv4 addresses in IPv6 notation are the last 32 bits.
        let (bits, kept, length) = match address {
            IpAddr::V4(_) if is_dotted => (IPV4_BITS, IPV4_BITS, length),
            IpAddr::V4(_) => {
                (IPV4_BITS, IPV4_BITS, length.map(|length| length.saturating_sub(MAPPED_PREFIX)))
            }
            IpAddr::V6(_) => (IPV6_BITS, self.ipv6_prefix, length),
        };
        match length {
            // Dotted IPv4 has a single form.
            None if address.is_ipv4() && is_dotted => Some(Cow::Borrowed(value)),
            Some(length) if length > bits => None,
            Some(length) if length < kept => {
                let network = IpNet::new(address, length).ok()?.trunc();
                Some(Cow::Owned(network.to_string().into_bytes()))
            }
            _ => Some(self.network(address)),
        }
    }

    /// The canonical form of an address; for IPv6, of its network.
    fn network(&self, address: IpAddr) -> Cow<'static, [u8]> {
        Cow::Owned(address::mask_ipv6(address, self.ipv6_prefix).to_string().into_bytes())
    }

    /// Whether a network in a condition can never match because addresses are truncated to a shorter prefix.
    pub(crate) fn truncates(&self, network: &IpNet) -> bool {
        matches!(network, IpNet::V6(v6) if v6.prefix_len() > self.ipv6_prefix)
    }
}

impl HashSecret {
    /// Creates a key that all instances share.
    pub fn new(secret: impl Into<Vec<u8>>) -> Self {
        Self(secret.into())
    }

    /// The random key of this process, generated at first use.
    pub fn of_process() -> Self {
        static OF_PROCESS: OnceLock<[u8; 32]> = OnceLock::new();
        let secret = OF_PROCESS.get_or_init(|| {
            let mut bytes = [0; 32];
            getrandom::fill(&mut bytes).expect("the system provides random bytes");
            bytes
        });
        Self(secret.to_vec())
    }

    /// The hash includes the label's name, so that equal values of two labels have different hashes.
    fn hash(&self, label: &str, value: &[u8]) -> Vec<u8> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC accepts keys of any length");
        mac.update(label.as_bytes());
        mac.update(&[0]);
        mac.update(value);
        let hash = mac.finalize().into_bytes();
        hex(&hash[..HASH_BYTES]).collect()
    }
}

impl fmt::Debug for HashSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashSecret(…)")
    }
}

/// A normalized value.
enum Cleaned<V> {
    Unchanged(V),
    Changed(Vec<u8>),
}

impl<V: AsRef<[u8]>> AsRef<[u8]> for Cleaned<V> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Unchanged(value) => value.as_ref(),
            Self::Changed(value) => value,
        }
    }
}

/// Shortens a value to the maximum length of a label: its first [`SHORTENED_PREFIX`] bytes, `#` and the SHA-256 of the whole
/// value, truncated to 128 bits. Prefix patterns still match, and different values keep different counters. The hash has no
/// key, so that it is equal on all instances.
pub fn shortened(value: &[u8]) -> Cow<'_, [u8]> {
    if value.len() <= MAX_LABEL_VALUE {
        return Cow::Borrowed(value);
    }
    let mut short = Vec::with_capacity(MAX_LABEL_VALUE);
    short.extend_from_slice(&value[..SHORTENED_PREFIX]);
    short.push(b'#');
    short.extend(hex(&Sha256::digest(value)[..HASH_BYTES]));
    Cow::Owned(short)
}

fn hex(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().flat_map(|byte| format!("{byte:02x}").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str) -> LabelSettings {
        LabelSettings { secret: true, ..LabelSettings::new(name) }
    }

    fn ip(name: &str, ipv6_prefix: u8) -> LabelSettings {
        LabelSettings { kind: LabelKind::Ip, ipv6_prefix, ..LabelSettings::new(name) }
    }

    fn policy(labels: impl Into<Vec<LabelSettings>>) -> LabelPolicy {
        LabelPolicy::new(labels.into(), HashSecret::new("key"))
    }

    fn value(policy: &LabelPolicy, name: &str, value: &str) -> String {
        let labels = policy.clean([(name, value)]).unwrap();
        String::from_utf8(labels.get(name).unwrap().to_vec()).unwrap()
    }

    #[test]
    fn addresses_are_canonical_and_ipv6_is_truncated_to_a_network() {
        let policy = policy([ip("ip", 64), ip("peer", 48), ip("host", 128)]);
        for (label, given, expected) in [
            ("ip", "203.0.113.9", "203.0.113.9"),
            ("ip", "::ffff:203.0.113.9", "203.0.113.9"),
            ("ip", "::FFFF:cb00:7109", "203.0.113.9"),
            ("ip", "2001:DB8:0:1:2:3:4:5", "2001:db8:0:1::"),
            ("ip", "2001:db8:0:1::", "2001:db8:0:1::"),
            ("ip", "::1", "::"),
            ("peer", "2001:db8:1:2:3:4:5:6", "2001:db8:1::"),
            ("host", "2001:db8:0:0:0:0:0:1", "2001:db8::1"),
            ("other", "2001:DB8::1", "2001:DB8::1"),
        ] {
            assert_eq!(value(&policy, label, given), expected, "{label} {given}");
        }
    }

    #[test]
    fn a_configured_address_label_rejects_other_values() {
        let policy = policy([ip("ip", 64)]);
        for given in
            ["", "localhost", "1.2.3", "1.2.3.4 ", "1.2.3.4:80", "[::1]", "fe80::1%eth0", &"1".repeat(2000)]
        {
            let error = policy.clean([("route", "x"), ("ip", given)]).unwrap_err();
            assert_eq!(error, CleanError::NotAnAddress { label: "ip".into() });
        }
        let error = policy.clean([("ip", &b"\xff"[..])]).unwrap_err();
        assert!(error.to_string().contains("203.0.113.9"));
    }

    #[test]
    fn the_label_ip_is_normalized_by_default_and_accepts_other_values() {
        let policy = LabelPolicy::default();
        assert_eq!(value(&policy, "ip", "::ffff:1.2.3.4"), "1.2.3.4");
        assert_eq!(value(&policy, "ip", "2001:db8::1:0:0:1"), "2001:db8::");
        assert_eq!(value(&policy, "ip", "somebody"), "somebody");
        let text = self::policy([LabelSettings::new("ip")]);
        assert_eq!(value(&text, "ip", "2001:db8::1"), "2001:db8::1");
    }

    #[test]
    fn addresses_of_envoy_are_normalized_by_default_with_or_without_a_prefix_length() {
        let policy = LabelPolicy::default();
        for label in ["remote_address", "masked_remote_address"] {
            for (given, expected) in [
                ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::"),
                ("2001:db8:0:1:2:3:4:5/128", "2001:db8:0:1::"),
                ("2001:DB8::/48", "2001:db8::/48"),
                ("2001:db8::/64", "2001:db8::"),
                ("2001:db8::/129", "2001:db8::/129"),
                ("::ffff:203.0.113.9/128", "203.0.113.9"),
                ("::ffff:192.0.2.0/120", "192.0.2.0/24"),
                ("192.0.2.0/24", "192.0.2.0/24"),
                ("192.0.2.0/16", "192.0.0.0/16"),
                ("192.0.2.1/32", "192.0.2.1"),
                ("192.0.2.0/033", "192.0.2.0/033"),
                ("192.0.2.1", "192.0.2.1"),
                ("somebody", "somebody"),
                ("2001:db8::1/", "2001:db8::1/"),
                ("2001:db8::1/x", "2001:db8::1/x"),
                ("/64", "/64"),
            ] {
                assert_eq!(value(&policy, label, given), expected, "{label} {given}");
            }
        }
    }

    #[test]
    fn a_secret_is_hashed_with_the_key_and_its_label() {
        let policy = policy([secret("api_key"), secret("other")]);
        let hashed = value(&policy, "api_key", "s3cret");
        // printf 'api_key\0s3cret' | openssl dgst -sha256 -hmac key
        assert_eq!(hashed, HASHED);
        assert_ne!(hashed, value(&policy, "other", "s3cret"));
        assert_ne!(hashed, value(&policy, "api_key", "s3cret2"));
        let elsewhere = LabelPolicy::new(vec![secret("api_key")], HashSecret::new("other key"));
        assert_ne!(hashed, value(&elsewhere, "api_key", "s3cret"));
        let shown = format!("{:?}", LabelPolicy::new(Vec::new(), HashSecret::new("s3cret")));
        assert!(!shown.contains("s3cret") && shown.contains("HashSecret(…)"), "{shown}");
    }

    const HASHED: &str = "c4853d1055d1628a4a6839d1ccc8a040";

    #[test]
    fn a_secret_address_is_canonicalized_before_it_is_hashed() {
        let policy = policy([LabelSettings { kind: LabelKind::Ip, ..secret("ip") }]);
        assert_eq!(value(&policy, "ip", "::ffff:1.2.3.4"), value(&policy, "ip", "1.2.3.4"));
        assert_eq!(value(&policy, "ip", "1.2.3.4").len(), 2 * HASH_BYTES);
    }

    #[test]
    fn the_key_of_a_process_does_not_change() {
        assert_eq!(HashSecret::of_process(), HashSecret::of_process());
    }

    #[test]
    fn invalid_labels_are_rejected() {
        let error = LabelPolicy::default().clean([("a", "1"), ("a", "2")]).unwrap_err();
        assert_eq!(error, CleanError::Label(LabelError::Repeated("a".into())));
    }

    #[test]
    fn a_long_value_keeps_its_prefix_and_stays_different_from_others() {
        let policy = policy([secret("api_key")]);
        let long = |last: char| format!("/api/{}{last}", "x".repeat(MAX_LABEL_VALUE));
        let clean = |name: &str, value: &str| {
            let labels = policy.clean_shortened([(name, value)]).unwrap();
            String::from_utf8(labels.get(name).unwrap().to_vec()).unwrap()
        };
        let (one, two) = (clean("path", &long('1')), clean("path", &long('2')));
        assert_eq!((one.len(), two.len()), (MAX_LABEL_VALUE, MAX_LABEL_VALUE));
        assert_eq!(one[..=SHORTENED_PREFIX], format!("{}#", &long('1')[..SHORTENED_PREFIX]));
        assert_ne!(one, two);
        assert_eq!(one, clean("path", &long('1')));
        // printf '/api/%01024d1' 0 | tr 0 x | sha256sum
        assert_eq!(&one[SHORTENED_PREFIX + 1..], LONG_HASHED);
        let fits = &long('1')[..MAX_LABEL_VALUE];
        assert_eq!(clean("path", fits), fits);
        assert_eq!(clean("api_key", &long('1')).len(), 2 * HASH_BYTES, "a secret is hashed as a whole");
        assert!(policy.clean([("path", long('1'))]).is_err());
    }

    const LONG_HASHED: &str = "a9a20dbc3aa67279d2e8264093caa906";

    #[test]
    fn headers_are_listed_with_their_labels() {
        let mut label = secret("api_key");
        label.header = Some("x-api-key".to_owned());
        let policy = policy([label, LabelSettings::new("route")]);
        assert_eq!(policy.headers().collect::<Vec<_>>(), [("api_key", "x-api-key")]);
    }
}
