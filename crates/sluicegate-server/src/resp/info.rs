//! What the server says about itself.

use std::{
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use tokio::time::Instant;

use super::server::MAX_CONNECTIONS;

/// The version, as `HELLO` and `INFO` say it.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What is counted over all connections.
#[derive(Debug)]
pub(super) struct Numbers {
    begun: Instant,
    connected: AtomicU64,
    connections: AtomicU64,
    commands: AtomicU64,
    protocol_errors: AtomicU64,
}

impl Numbers {
    pub(super) fn new() -> Self {
        let [connected, connections, commands, protocol_errors] = [const { AtomicU64::new(0) }; 4];
        Self { begun: Instant::now(), connected, connections, commands, protocol_errors }
    }

    /// A client has come. Its number, from 1 on.
    pub(super) fn connected(&self) -> u64 {
        self.connected.fetch_add(1, Ordering::Relaxed);
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn disconnected(&self) {
        self.connected.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn served(&self, commands: u64) {
        self.commands.fetch_add(commands, Ordering::Relaxed);
    }

    pub(super) fn broke_protocol(&self) {
        self.protocol_errors.fetch_add(1, Ordering::Relaxed);
    }

    /// The sections of `INFO` that are asked for; all of them unless some are named.
    pub(super) fn info<'a>(&self, sections: impl Iterator<Item = &'a [u8]> + Clone) -> String {
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let server = format!(
            "sluicegate_version:{VERSION}\r\nredis_mode:standalone\r\nprocess_id:{}\r\nuptime_in_seconds:{}\r\n",
            process::id(),
            self.begun.elapsed().as_secs()
        );
        let clients =
            format!("connected_clients:{}\r\nmaxclients:{MAX_CONNECTIONS}\r\n", number(&self.connected));
        let stats = format!(
            "total_connections_received:{}\r\ntotal_commands_processed:{}\r\nprotocol_errors:{}\r\n",
            number(&self.connections),
            number(&self.commands),
            number(&self.protocol_errors)
        );
        // clients that ask whether a server is ready look for this
        let persistence = "loading:0\r\n".to_owned();
        let parts =
            [("Server", server), ("Clients", clients), ("Persistence", persistence), ("Stats", stats)];
        let is_asked = |name: &str| {
            let asks = |section: &[u8]| {
                [name, "all", "default", "everything"]
                    .iter()
                    .any(|known| section.eq_ignore_ascii_case(known.as_bytes()))
            };
            sections.clone().next().is_none() || sections.clone().any(asks)
        };
        let asked = parts.iter().filter(|(name, _)| is_asked(name));
        asked.map(|(name, lines)| format!("# {name}\r\n{lines}")).collect::<Vec<_>>().join("\r\n")
    }
}
