//! Unusual ends of responses.

use std::convert::Infallible;

use hyper_util::rt::{TokioExecutor, TokioIo};
use tower::{Layer, ServiceExt, service_fn};

use super::*;

#[tokio::test]
async fn the_response_to_a_head_request_frees_its_slot() {
    let limiter = Limiter::in_memory([in_flight(1)]).unwrap();
    let app = Router::new()
        .route("/", get(async || Body::from_stream(stream::pending::<Chunk>())))
        .layer(RateLimitLayer::new(limiter.clone()));
    let address = serve(app).await;
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let request = Request::head(format!("http://{address}/")).body(Empty::new()).unwrap();
    assert_eq!(client.request(request).await.unwrap().status(), 200);
    until_remaining(&limiter, 1).await;
}

#[tokio::test]
async fn a_stream_that_an_http_2_client_resets_frees_its_slot() {
    let limiter = Limiter::in_memory([in_flight(1)]).unwrap();
    let mut server = Server::start(RateLimitLayer::new(limiter.clone())).await;
    let io = TokioIo::new(tokio::net::TcpStream::connect(server.address).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Empty<Bytes>>(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get(format!("http://{}/", server.address)).body(Empty::new()).unwrap();
    let mut response = sender.send_request(request).await.unwrap();
    let stream = server.streams.recv().await.unwrap();
    stream.send("a");
    next_chunk(&mut response).await.unwrap();
    assert_eq!(remaining(&limiter, "requests").await, 0);
    drop(response);
    until_remaining(&limiter, 1).await;
    // the connection is still open
    let request = Request::get(format!("http://{}/", server.address)).body(Empty::new()).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), 200);
}

#[test]
fn a_response_that_outlives_its_runtime_frees_its_slot() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let limiter = Limiter::in_memory([in_flight(1)]).unwrap();
    let inner = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let service = RateLimitLayer::new(limiter.clone()).layer(inner);
    let response = first.block_on(service.clone().oneshot(Request::new(()))).unwrap();
    let other = first.block_on(service.oneshot(Request::new(()))).unwrap();
    assert_eq!(other.status(), 429);
    drop(first);
    assert_eq!(second.block_on(remaining(&limiter, "requests")), 0);
    drop(response);
    assert_eq!(second.block_on(remaining(&limiter, "requests")), 1);
}

#[tokio::test]
async fn the_hint_and_the_end_of_a_held_body_are_those_of_the_inner_body() {
    use http_body::Body as _;
    let limiter = Limiter::in_memory([in_flight(9)]).unwrap();
    let inner = service_fn(async |request: Request<&'static str>| {
        Ok::<_, Infallible>(Response::new(Body::from(*request.body())))
    });
    let service = RateLimitLayer::new(limiter.clone()).layer(inner);
    for text in ["", "hello"] {
        let response = service.clone().oneshot(Request::new(text)).await.unwrap();
        let mut body = response.into_body();
        assert_eq!(body.size_hint().exact(), Some(text.len() as u64));
        assert_eq!(body.is_end_stream(), text.is_empty());
        while body.frame().await.is_some() {}
        assert!(body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
        drop(body);
    }
    assert_eq!(remaining(&limiter, "requests").await, 9);
}
