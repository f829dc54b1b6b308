//! `tollgate serve`: the server.

use std::{error::Error, net::SocketAddr};

use clap::Args;
use tollgate::{Limiter, redis::URLS};
use tollgate_server::{
    demo,
    desk::Desk,
    forward_auth::{self, Settings},
    http,
    serve::{Server, stop_signal},
    store::{AnyStore, StoreUrl},
};

use crate::output;

/// Answer "may this request pass?" over HTTP
///
/// Decides by a small set of demo rules until SIGTERM or Ctrl-C, and then finishes the requests in flight.
/// Flags beat the environment.
#[derive(Args)]
pub(crate) struct Serve {
    /// Address of the JSON API: a loopback address and a port; port 0 picks a free one
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "TOLLGATE_HTTP",
        default_value = "127.0.0.1:8080",
        value_parser = address
    )]
    http: SocketAddr,

    // Not read by clap, which repeats what it cannot read: this may hold a password.
    #[arg(
        long,
        value_name = "URL",
        env = "TOLLGATE_STORE_URL",
        hide_env_values = true,
        help = format!("Where counters are kept: memory: (this process), {URLS}"),
        default_value = "memory:"
    )]
    store: String,
}

impl Serve {
    pub(crate) async fn run(self) -> Result<(), Box<dyn Error>> {
        let url: StoreUrl = self.store.parse()?;
        let server = Server::bind(self.http).await?;
        let limiter = Limiter::new(AnyStore::open(&url).await?, demo::rules())?;
        let stop = stop_signal()?;
        announce(server.address(), &url, &limiter);
        let desk = Desk::new(limiter);
        let routes = http::router(desk.clone()).merge(forward_auth::router(desk, Settings::default()));
        server.run(routes, stop).await;
        output::line("stopped");
        Ok(())
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "use an IP address and a port, for example 127.0.0.1:8080".to_owned())
}

fn announce(address: SocketAddr, store: &StoreUrl, limiter: &Limiter<AnyStore>) {
    output::line(format_args!("tollgate listens on http://{address}"));
    output::line(format_args!("store  {store}"));
    for rule in limiter.rules().rules() {
        output::line(format_args!("rule   {}", demo::summary(rule)));
    }
    output::line("");
    output::line(format_args!(
        "Try this {} times within a minute; the last one is refused:",
        demo::LOGINS_PER_MINUTE + 1
    ));
    output::line(format_args!("  curl -w '\\n' http://{address}/v1/check -d '{}'", demo::LOGIN));
}
