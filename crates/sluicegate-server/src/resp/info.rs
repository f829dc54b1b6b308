//! The `INFO` command.

use std::{
    process,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use tokio::time::Instant;

use super::server::MAX_CONNECTIONS;

/// The version in `HELLO` and `INFO`.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Counters over all connections.
#[derive(Debug)]
pub(super) struct ServerInfo {
    started: Instant,
    max_clients: AtomicUsize,
    connected: AtomicU64,
    connections: AtomicU64,
    commands: AtomicU64,
    protocol_errors: AtomicU64,
}

impl ServerInfo {
    pub(super) fn new() -> Self {
        let [connected, connections, commands, protocol_errors] = [const { AtomicU64::new(0) }; 4];
        let max_clients = AtomicUsize::new(MAX_CONNECTIONS);
        Self { started: Instant::now(), max_clients, connected, connections, commands, protocol_errors }
    }

    pub(super) fn set_max_clients(&self, max_clients: usize) {
        self.max_clients.store(max_clients, Ordering::Relaxed);
    }

    /// Records a new client. Returns its number, starting with 1.
    pub(super) fn connected(&self) -> u64 {
        self.connected.fetch_add(1, Ordering::Relaxed);
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn disconnected(&self) {
        self.connected.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn record_commands(&self, commands: u64) {
        self.commands.fetch_add(commands, Ordering::Relaxed);
    }

    pub(super) fn record_protocol_error(&self) {
        self.protocol_errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the requested sections; all sections if none is named.
    pub(super) fn info<'a>(&self, sections: impl Iterator<Item = &'a [u8]> + Clone) -> String {
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let server = format!(
            "sluicegate_version:{VERSION}\r\nredis_mode:standalone\r\nprocess_id:{}\r\nuptime_in_seconds:{}\r\n",
            process::id(),
            self.started.elapsed().as_secs()
        );
        let max_clients = self.max_clients.load(Ordering::Relaxed);
        let clients =
            format!("connected_clients:{}\r\nmaxclients:{max_clients}\r\n", number(&self.connected));
        let stats = format!(
            "total_connections_received:{}\r\ntotal_commands_processed:{}\r\nprotocol_errors:{}\r\n",
            number(&self.connections),
            number(&self.commands),
            number(&self.protocol_errors)
        );
        // some clients check this field for readiness
        let persistence = "loading:0\r\n".to_owned();
        let parts =
            [("Server", server), ("Clients", clients), ("Persistence", persistence), ("Stats", stats)];
        let is_requested = |name: &str| {
            let includes = |section: &[u8]| {
                [name, "all", "default", "everything"]
                    .iter()
                    .any(|known| section.eq_ignore_ascii_case(known.as_bytes()))
            };
            sections.clone().next().is_none() || sections.clone().any(includes)
        };
        let requested = parts.iter().filter(|(name, _)| is_requested(name));
        requested.map(|(name, lines)| format!("# {name}\r\n{lines}")).collect::<Vec<_>>().join("\r\n")
    }
}
