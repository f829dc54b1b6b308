//! The dashboard: a page for people, in `assets/`, as it is served. Nothing is built, and nothing comes from elsewhere.
//!
//! The page holds no data and is for everybody. What it shows it asks for like any other client, with the token that its
//! visitor gave it: `/v1/live`, and `/v1/check`, `/v1/peek` and `/v1/explain` to try a request.

use std::sync::LazyLock;

use axum::{
    Router,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use sha2::{Digest, Sha256};

/// What the page may do: run and load what this server has, and call this server. Others may not show it in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page.
struct Asset {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! assets {
    ($($name:literal: $content_type:expr),* $(,)?) => {
        [$(Asset {
            path: concat!("/assets/", $name),
            content_type: $content_type,
            text: include_str!(concat!("assets/", $name)),
        }),*]
    };
}

const PAGE: Asset = Asset { path: "/", content_type: HTML, text: include_str!("assets/index.html") };

const ASSETS: [Asset; 13] = assets![
    "dashboard.css": CSS,
    "theme.js": SCRIPT,
    "main.js": SCRIPT,
    "live.js": SCRIPT,
    "series.js": SCRIPT,
    "charts.js": SCRIPT,
    "tables.js": SCRIPT,
    "try.js": SCRIPT,
    "timeline.js": SCRIPT,
    "words.js": SCRIPT,
    "icon.svg": "image/svg+xml",
    "vendor/uplot-1.6.32.min.css": CSS,
    "vendor/uplot-1.6.32.min.js": SCRIPT,
];

/// The tags of all files, the page's first: they change with what is in them.
static TAGS: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| {
    let tag = |asset: &Asset| {
        let digest = Sha256::digest(asset.text);
        let digits: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        HeaderValue::from_str(&format!("\"{digits}\"")).expect("hexadecimal digits are visible")
    };
    [&PAGE].into_iter().chain(&ASSETS).map(tag).collect()
});

/// The page.
pub(crate) async fn page(request: Request) -> Response {
    let mut response = serve(&PAGE, &TAGS[0], &request);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// What the page is made of.
pub(crate) fn assets<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let routes = ASSETS.iter().zip(&TAGS[1..]);
    routes.fold(Router::new(), |router, (asset, tag)| {
        router.route(asset.path, get(async move |request: Request| serve(asset, tag, &request)))
    })
}

/// The file, unless its reader has it already.
fn serve(asset: &Asset, tag: &HeaderValue, request: &Request) -> Response {
    let known = request.headers().get_all(header::IF_NONE_MATCH).iter();
    let tags = known.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let is_known = tags.map(|known| known.trim().trim_start_matches("W/")).any(|known| known == tag);
    let headers = [
        (header::ETAG, tag.clone()),
        // asked for again each time, and sent again when the server has another one
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CONTENT_TYPE, HeaderValue::from_static(asset.content_type)),
    ];
    if is_known {
        (StatusCode::NOT_MODIFIED, headers).into_response()
    } else {
        (headers, asset.text).into_response()
    }
}
