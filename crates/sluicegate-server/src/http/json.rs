//! JSON responses, serialized into one buffer.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

/// The initial capacity of the buffer: enough for most responses.
const INITIAL_CAPACITY: usize = 512;

/// A JSON response. Takes half the time of axum's `Json`, which checks the capacity of its buffer for every token.
#[derive(Debug)]
pub(super) struct Json<T>(pub(super) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        let mut bytes = Vec::with_capacity(INITIAL_CAPACITY);
        match serde_json::to_writer(&mut bytes, &self.0) {
            Ok(()) => response(bytes),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
    }
}

/// Direct serialization for the response of nearly every request. serde scans every member name for characters to escape each time.
pub(super) trait WriteJson {
    /// Appends the value as serde would write it.
    fn write(&self, json: &mut Vec<u8>);

    fn response(&self) -> Response {
        let mut bytes = Vec::with_capacity(INITIAL_CAPACITY);
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
        WriteJson::write(&$first_value, $json);
        $(
            $json.extend_from_slice(concat!(",\"", $name, "\":").as_bytes());
            WriteJson::write(&$value, $json);
        )+
        $json.push(b'}');
    };
}
pub(super) use object;

impl WriteJson for bool {
    fn write(&self, json: &mut Vec<u8>) {
        json.extend_from_slice(if *self { b"true" } else { b"false" });
    }
}

impl WriteJson for u64 {
    fn write(&self, json: &mut Vec<u8>) {
        json.extend_from_slice(itoa::Buffer::new().format(*self).as_bytes());
    }
}

impl WriteJson for &str {
    fn write(&self, json: &mut Vec<u8>) {
        // without an early exit, so that several bytes are compared at a time
        let is_plain =
            self.bytes().fold(true, |plain, byte| plain & (byte >= b' ') & (byte != b'"') & (byte != b'\\'));
        if is_plain {
            json.push(b'"');
            json.extend_from_slice(self.as_bytes());
            json.push(b'"');
        } else {
            serde_json::to_writer(json, self).expect("writing a string to memory cannot fail");
        }
    }
}

impl<T: WriteJson> WriteJson for Option<T> {
    fn write(&self, json: &mut Vec<u8>) {
        match self {
            Some(value) => value.write(json),
            None => json.extend_from_slice(b"null"),
        }
    }
}

impl<T: WriteJson> WriteJson for [T] {
    fn write(&self, json: &mut Vec<u8>) {
        json.push(b'[');
        for (index, value) in self.iter().enumerate() {
            if index > 0 {
                json.push(b',');
            }
            value.write(json);
        }
        json.push(b']');
    }
}
