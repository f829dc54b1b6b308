//! The conformance suite, on every store.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use tollgate::{ManualClock, MemoryStore, RedisStore};
use tollgate_testkit::{
    server::{Flavor, Server},
    subject::{START, Subject},
};

async fn on_redis(flavor: Flavor) -> Subject<RedisStore> {
    let server = Server::start(flavor);
    let clock = ManualClock::new(START);
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    Subject { store, clock, server: Some(server) }
}

mod memory {
    use super::*;

    async fn subject() -> Subject<MemoryStore> {
        let clock = ManualClock::new(START);
        Subject { store: MemoryStore::new().with_clock(clock.clone()), clock, server: None }
    }

    tollgate_testkit::conformance!(subject());
}

mod redis_7 {
    use super::*;

    tollgate_testkit::conformance!(on_redis(Flavor::Redis7));
}

mod redis_6 {
    use super::*;

    tollgate_testkit::conformance!(on_redis(Flavor::Redis6));
}

mod valkey_9 {
    use super::*;

    tollgate_testkit::conformance!(on_redis(Flavor::Valkey9));
}
