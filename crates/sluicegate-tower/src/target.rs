//! The target of a request (path, host and headers) as labels, for the middleware and the server's forward-auth.
//!
//! Clients control method, path and host. Some services accept paths that are longer than a label or have characters that
//! are invalid in a URI, so neither is an error. Nothing is decoded, and long values are truncated; only ambiguous requests
//! are rejected.

use http::{HeaderMap, HeaderValue};
use sluicegate::labels::MAX_LABEL_VALUE;

use crate::denial::CheckError;

/// Returns the path of a request target as written, without query, fragment, scheme and host. It is `/` if the target has no
/// path.
///
/// ```
/// use sluicegate_tower::target::path;
///
/// assert_eq!(path(b"/a%20b`c?d=/e"), b"/a%20b`c");
/// assert_eq!(path(b"http://example.com/a"), b"/a");
/// ```
pub fn path(target: &[u8]) -> &[u8] {
    let end = target.iter().position(|byte| b"?#".contains(byte)).unwrap_or(target.len());
    let target = &target[..end];
    let path = match after_scheme(target) {
        Some(rest) => &rest[rest.iter().position(|&byte| byte == b'/').unwrap_or(rest.len())..],
        None => target,
    };
    if path.is_empty() { b"/" } else { truncate(path) }
}

/// Returns the host of `name:port` in canonical form: lower case, without port and without a trailing dot. An invalid name is
/// not changed otherwise.
///
/// ```
/// use sluicegate_tower::target::host;
///
/// assert_eq!(host(b"EXAMPLE.com.:8080"), b"example.com");
/// assert_eq!(host(b"[2001:DB8::1]:443"), b"[2001:db8::1]");
/// ```
pub fn host(authority: &[u8]) -> Vec<u8> {
    let after_user = authority.iter().rposition(|&byte| byte == b'@').map_or(0, |at| at + 1);
    let authority = &authority[after_user..];
    let end = if authority.starts_with(b"[") {
        authority.iter().position(|&byte| byte == b']').map(|bracket| bracket + 1)
    } else {
        authority.iter().position(|&byte| byte == b':')
    };
    let host = &authority[..end.unwrap_or(authority.len())];
    truncate(host.strip_suffix(b".").unwrap_or(host)).to_ascii_lowercase()
}

/// Returns the value of a header that must not be repeated, because the limiter and the service could use different ones.
///
/// # Errors
/// If the header is repeated.
pub fn single<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a [u8]>, CheckError> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (_, Some(_)) => Err(CheckError::BadRequest(format!("header {name} is repeated: send it once"))),
        (first, None) => Ok(first.map(HeaderValue::as_bytes)),
    }
}

/// Truncates a value to the maximum length of a label. Prefix patterns still match, and long values with a common start share
/// a counter, so a client cannot evade a rule with a longer value.
pub fn truncate(value: &[u8]) -> &[u8] {
    &value[..value.len().min(MAX_LABEL_VALUE)]
}

/// Returns the part of an absolute URI after the scheme.
fn after_scheme(target: &[u8]) -> Option<&[u8]> {
    let end = target.iter().position(|byte| !byte.is_ascii_alphanumeric() && !b"+-.".contains(byte))?;
    target[end..].strip_prefix(b"://").filter(|_| end > 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_path_ends_before_query_and_fragment() {
        let table: [(&[u8], &[u8]); 18] = [
            (b"/", b"/"),
            (b"/a?b", b"/a"),
            (b"/a#b?c", b"/a"),
            (b"/a?b#c", b"/a"),
            (b"/a/../%62//c", b"/a/../%62//c"),
            (b"/`<>{}|\\^\"", b"/`<>{}|\\^\""),
            (b"/\xc3\xa9\xff", b"/\xc3\xa9\xff"),
            (b"//example.com/a", b"//example.com/a"),
            (b"/http://example.com/a", b"/http://example.com/a"),
            (b"/a?http://example.com/b", b"/a"),
            (b"http://example.com/a?b", b"/a"),
            (b"HTTPS://user@example.com:80/a://b", b"/a://b"),
            (b"http://example.com", b"/"),
            (b"http://example.com?/a", b"/"),
            (b"://a", b"://a"),
            (b"?a", b"/"),
            (b"", b"/"),
            (b"*", b"*"),
        ];
        for (target, expected) in table {
            assert_eq!(path(target), expected, "{}", target.escape_ascii());
        }
    }

    #[test]
    fn a_host_is_canonical_and_an_invalid_one_is_kept() {
        let table: [(&[u8], &[u8]); 11] = [
            (b"example.com", b"example.com"),
            (b"EXAMPLE.com.:8080", b"example.com"),
            (b"example.com:80:80", b"example.com"),
            (b"example.com:", b"example.com"),
            (b"user:word@example.com:80", b"example.com"),
            (b"[2001:DB8::1]:80", b"[2001:db8::1]"),
            (b"[2001:DB8::1", b"[2001:db8::1"),
            (b"A<b", b"a<b"),
            (b"\xff", b"\xff"),
            (b":80", b""),
            (b"", b""),
        ];
        for (authority, expected) in table {
            assert_eq!(host(authority), expected, "{}", authority.escape_ascii());
        }
    }

    #[test]
    fn long_values_are_truncated_to_the_length_of_a_label() {
        let long = [b"/", &*b"x".repeat(2 * MAX_LABEL_VALUE)].concat();
        assert_eq!(path(&long), &long[..MAX_LABEL_VALUE]);
        assert_eq!(path(&long[..MAX_LABEL_VALUE]), &long[..MAX_LABEL_VALUE]);
        assert_eq!(host(&b"X".repeat(2 * MAX_LABEL_VALUE)), b"x".repeat(MAX_LABEL_VALUE));
    }

    proptest! {
        /// For valid URIs and authorities, the results equal those of the `http` crate.
        #[test]
        fn valid_targets_are_parsed_as_by_the_http_crate(
            target in "(https?://[a-z.]{1,9}(:[0-9]{1,3})?)?(/[a-z%:/.@]{0,20}([?#][a-z/?:@]{0,9})?)?",
            authority in "([a-z]{1,3}@)?([a-z.]{1,9}|\\[::[0-9]{1,3}\\])(:[0-9]{1,3})?",
        ) {
            if let Ok(uri) = target.parse::<http::Uri>() {
                prop_assert_eq!(path(target.as_bytes()), uri.path().as_bytes());
            }
            if let Ok(parsed) = authority.parse::<http::uri::Authority>() {
                let expected = parsed.host().strip_suffix('.').unwrap_or(parsed.host()).as_bytes();
                prop_assert_eq!(host(authority.as_bytes()), expected);
            }
        }
    }
}
