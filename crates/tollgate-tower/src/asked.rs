//! What a request asks for, as the middleware and the server's forward-auth label it.
//!
//! A client writes method, path and host as it likes. Services serve paths that are longer than a label may be, or that have characters
//! which no URI should: that is no reason to refuse a request, least of all where no rule looks. So nothing is decoded, and what is too
//! long is cut; only what could be read in two ways is a mistake.

use http::{HeaderMap, HeaderValue};
use tollgate::labels::MAX_LABEL_VALUE;

use crate::refusal::Mistake;

/// The path within a request's target, as it is written: without query and fragment, and without the scheme and host that
/// stand before it where a proxy is asked. Where there is none, it is `/`.
///
/// ```
/// use tollgate_tower::asked::path;
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
    if path.is_empty() { b"/" } else { cut(path) }
}

/// The host within `name:port`, in one spelling: without port, in lower case and without the dot that may end it. What is no
/// name is taken as it is.
///
/// ```
/// use tollgate_tower::asked::host;
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
    cut(host.strip_suffix(b".").unwrap_or(host)).to_ascii_lowercase()
}

/// The value of a header that may be given once: of two, the limiter and the service behind it might each take another.
///
/// # Errors
/// When it is given more than once.
pub fn single<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a [u8]>, Mistake> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (_, Some(_)) => {
            Err(Mistake::OfCaller(format!("the header {name} is given more than once: give it once")))
        }
        (first, None) => Ok(first.map(HeaderValue::as_bytes)),
    }
}

/// As much of a value as a label holds. It matches the prefixes that the whole matches, and values that begin alike share a counter:
/// nobody leaves a rule by writing more.
pub fn cut(value: &[u8]) -> &[u8] {
    &value[..value.len().min(MAX_LABEL_VALUE)]
}

/// What follows the scheme of an absolute URI.
fn after_scheme(target: &[u8]) -> Option<&[u8]> {
    let end = target.iter().position(|byte| !byte.is_ascii_alphanumeric() && !b"+-.".contains(byte))?;
    target[end..].strip_prefix(b"://").filter(|_| end > 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_path_is_what_stands_before_query_and_fragment() {
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
    fn a_host_has_one_spelling_and_what_is_none_stays_as_it_is() {
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
    fn what_is_too_long_is_cut_to_what_a_label_holds() {
        let long = [b"/", &*b"x".repeat(2 * MAX_LABEL_VALUE)].concat();
        assert_eq!(path(&long), &long[..MAX_LABEL_VALUE]);
        assert_eq!(path(&long[..MAX_LABEL_VALUE]), &long[..MAX_LABEL_VALUE]);
        assert_eq!(host(&b"X".repeat(2 * MAX_LABEL_VALUE)), b"x".repeat(MAX_LABEL_VALUE));
    }

    proptest! {
        /// Of what is a URI or an authority, these are the parts that `http` finds.
        #[test]
        fn what_is_well_formed_is_read_as_by_others(
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
