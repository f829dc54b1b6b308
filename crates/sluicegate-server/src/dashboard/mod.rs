//! The dashboard: a static page in `assets/`, served without a build step and without external resources.
//!
//! The page contains no data and needs no token. It loads its data through the API with the user's token: `/v1/live`, and
//! `/v1/check`, `/v1/peek` and `/v1/explain` to try a request.

use std::sync::LazyLock;

use axum::{
    Router,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use sha2::{Digest, Sha256};

/// The content security policy: the page loads resources from this server only and cannot be framed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A static file.
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
    "format.js": SCRIPT,
    "icon.svg": "image/svg+xml",
    "vendor/uplot-1.6.32.min.css": CSS,
    "vendor/uplot-1.6.32.min.js": SCRIPT,
];

/// The entity tags of all files, the page's first.
static TAGS: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| {
    let tag = |asset: &Asset| {
        let digest = Sha256::digest(asset.text);
        let digits: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        HeaderValue::from_str(&format!("\"{digits}\"")).expect("hexadecimal digits are valid in a header")
    };
    [&PAGE].into_iter().chain(&ASSETS).map(tag).collect()
});

/// Serves the page.
pub(crate) async fn page(request: Request) -> Response {
    let mut response = serve(&PAGE, &TAGS[0], &request);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// The routes of the page's files.
pub(crate) fn assets<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let routes = ASSETS.iter().zip(&TAGS[1..]);
    routes.fold(Router::new(), |router, (asset, tag)| {
        router.route(asset.path, get(async move |request: Request| serve(asset, tag, &request)))
    })
}

/// Serves a file, or 304 if the client has the current version.
fn serve(asset: &Asset, tag: &HeaderValue, request: &Request) -> Response {
    let known = request.headers().get_all(header::IF_NONE_MATCH).iter();
    let tags = known.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    let is_known = tags.map(|known| known.trim().trim_start_matches("W/")).any(|known| known == tag);
    let headers = [
        (header::ETAG, tag.clone()),
        // Browsers revalidate the file on each load.
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
