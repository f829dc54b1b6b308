//! An answer as JSON, written into one piece of memory.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

/// Room for a usual answer.
const USUAL_BYTES: usize = 512;

/// What is answered with. Takes half the time of axum's own, which asks for room with every word.
#[derive(Debug)]
pub(super) struct Json<T>(pub(super) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        let mut bytes = Vec::with_capacity(USUAL_BYTES);
        match serde_json::to_writer(&mut bytes, &self.0) {
            Ok(()) => response(bytes),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
    }
}

/// What is answered to nearly every request, and so writes itself: serde looks at each name of a member, every time, for what
/// has to be escaped in it.
pub(super) trait Written {
    /// Writes it as serde would.
    fn write(&self, json: &mut Vec<u8>);

    fn response(&self) -> Response {
        let mut bytes = Vec::with_capacity(USUAL_BYTES);
        self.write(&mut bytes);
        response(bytes)
    }
}

fn response(json: Vec<u8>) -> Response {
    let mut response = Response::new(json.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Writes an object whose names need no escaping.
macro_rules! object {
    ($json:expr, { $first:literal: $first_value:expr, $($name:literal: $value:expr),+ $(,)? }) => {
        $json.extend_from_slice(concat!("{\"", $first, "\":").as_bytes());
        Written::write(&$first_value, $json);
        $(
            $json.extend_from_slice(concat!(",\"", $name, "\":").as_bytes());
            Written::write(&$value, $json);
        )+
        $json.push(b'}');
    };
}
pub(super) use object;

impl Written for bool {
    fn write(&self, json: &mut Vec<u8>) {
        json.extend_from_slice(if *self { b"true" } else { b"false" });
    }
}

impl Written for u64 {
    fn write(&self, json: &mut Vec<u8>) {
        json.extend_from_slice(itoa::Buffer::new().format(*self).as_bytes());
    }
}

impl Written for &str {
    fn write(&self, json: &mut Vec<u8>) {
        // all of it in any case, which is several bytes at a time
        let is_plain =
            self.bytes().fold(true, |plain, byte| plain & (byte >= b' ') & (byte != b'"') & (byte != b'\\'));
        if is_plain {
            json.push(b'"');
            json.extend_from_slice(self.as_bytes());
            json.push(b'"');
        } else {
            serde_json::to_writer(json, self).expect("a text in memory is written to memory");
        }
    }
}

impl<T: Written> Written for Option<T> {
    fn write(&self, json: &mut Vec<u8>) {
        match self {
            Some(value) => value.write(json),
            None => json.extend_from_slice(b"null"),
        }
    }
}

impl<T: Written> Written for [T] {
    fn write(&self, json: &mut Vec<u8>) {
        json.push(b'[');
        for (place, value) in self.iter().enumerate() {
            if place > 0 {
                json.push(b',');
            }
            value.write(json);
        }
        json.push(b']');
    }
}
