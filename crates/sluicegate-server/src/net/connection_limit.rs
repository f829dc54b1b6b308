//! The connection slots of one listener: how many there are, which connection is evicted when all are taken, and the reaper that closes
//! connections over their timeout.
//!
//! Connections that send nothing, an incomplete request, or only requests that need no token cost a client almost
//! nothing. They must not exclude other clients, and neither must one address that opens very many connections.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

use super::activity::{Activity, Timeouts};

/// How long a connection must have been idle before it is evicted for a new one.
pub(crate) const MIN_IDLE: Duration = Duration::from_secs(1);

/// How long a connection counts as active after its last request, or after it was accepted.
const ACTIVE: Duration = Duration::from_secs(5);

/// How often the reaper checks all connections. A timeout takes effect up to this much later.
pub const REAP_INTERVAL: Duration = Duration::from_secs(1);

/// How long a request may take to arrive, from its first bytes. For HTTP, this is the head; other front ends have their own timeouts.
pub const INCOMPLETE_REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// By default, while all slots are taken, an address keeps the number of slots divided by this.
const DEFAULT_ADDRESS_PARTS: usize = 2;

/// The number of slots of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionLimits {
    /// Of all clients.
    pub(crate) total: usize,
    /// Of one address, while all slots are taken and other addresses wait.
    pub(crate) per_address: usize,
}

/// The slots of one listener, and the connections that occupy them.
pub(crate) struct ConnectionLimiter {
    limits: ConnectionLimits,
    timeouts: Timeouts,
    epoch: Instant,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    slots: Mutex<Slots>,
    /// Notified when a slot becomes free.
    freed: Notify,
}

#[derive(Default)]
struct Slots {
    next_id: u64,
    /// By id, so that the oldest of equally idle connections comes first. Bounded by the number of slots.
    occupied: BTreeMap<u64, Occupied>,
    /// The number of occupied slots of each address.
    by_address: HashMap<ClientNetwork, usize>,
}

#[derive(Clone)]
struct Occupied {
    network: ClientNetwork,
    activity: Activity,
}

/// The slot of one connection, freed on drop.
pub(crate) struct Slot {
    shared: Arc<Shared>,
    id: u64,
    activity: Activity,
}

/// The address of a client. Of an IPv6 address only the first 64 bits count, because a client usually has all addresses of such a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ClientNetwork(IpAddr);

impl ConnectionLimits {
    /// These many slots, of which an address keeps half unless `per_address` is given.
    pub(crate) fn new(total: usize, per_address: Option<usize>) -> Self {
        let per_address = per_address.unwrap_or(total.div_ceil(DEFAULT_ADDRESS_PARTS)).min(total);
        Self { total, per_address }
    }
}

impl From<IpAddr> for ClientNetwork {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
            address => address,
        })
    }
}

impl ConnectionLimiter {
    pub(crate) fn new(limits: ConnectionLimits, timeouts: Timeouts) -> Self {
        Self { limits, timeouts, epoch: Instant::now(), shared: Arc::default() }
    }

    /// The number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.limits.total
    }

    /// Occupies a slot, if one is free.
    pub(crate) fn occupy(&self, network: ClientNetwork) -> Option<Slot> {
        let mut slots = self.shared.slots.lock();
        if slots.occupied.len() >= self.limits.total {
            return None;
        }
        let id = slots.next_id;
        slots.next_id += 1;
        let activity = Activity::new(self.epoch, self.timeouts);
        slots.occupied.insert(id, Occupied { network, activity: activity.clone() });
        *slots.by_address.entry(network).or_default() += 1;
        Some(Slot { shared: Arc::clone(&self.shared), id, activity })
    }

    /// Waits until a slot has become free.
    pub(crate) async fn freed(&self) {
        self.shared.freed.notified().await;
    }

    /// The number of slots that an address occupies.
    pub(crate) fn count(&self, network: ClientNetwork) -> usize {
        self.shared.slots.lock().count(network)
    }

    /// How many active connections each thread serves.
    pub(crate) fn active_per_thread(&self, threads: usize) -> Vec<usize> {
        let (mut active, now) = (vec![0; threads], Instant::now());
        let slots = self.shared.slots.lock();
        for activity in slots.activities().filter(|activity| activity.idle_time(now) < ACTIVE) {
            if let Some(count) = activity.thread().and_then(|thread| active.get_mut(thread)) {
                *count += 1;
            }
        }
        active
    }

    /// Evicts a connection for a new one of this address, if there is one that may be evicted.
    pub(crate) fn evict_for(&self, network: ClientNetwork) {
        if let Some(activity) = self.shared.slots.lock().victim(network, self.limits) {
            activity.abort();
        }
    }

    /// The reaper: closes connections over their timeout, for as long as it is polled.
    pub(crate) async fn reap(&self) -> Infallible {
        loop {
            sleep(REAP_INTERVAL).await;
            let now = Instant::now();
            self.shared.slots.lock().activities().for_each(|activity| activity.reap(now));
        }
    }

    /// Requests every connection to close.
    pub(crate) fn shut_down(&self) {
        self.shared.slots.lock().activities().for_each(Activity::shut_down);
    }
}

impl Slots {
    fn activities(&self) -> impl Iterator<Item = &Activity> {
        self.occupied.values().map(|occupied| &occupied.activity)
    }

    fn count(&self, network: ClientNetwork) -> usize {
        self.by_address.get(&network).copied().unwrap_or(0)
    }

    /// The connection to evict for a new one of this address: first one that is idle and not authenticated, then one of an address that
    /// occupies more than its share, then one that is idle. While any connection is not authenticated, the new connection waits until
    /// that one is idle: clients that reconnect continuously must not evict those with a token.
    fn victim(&self, network: ClientNetwork, limits: ConnectionLimits) -> Option<&Activity> {
        let now = Instant::now();
        let idle = self.activities().filter(|activity| activity.idle_time(now) >= MIN_IDLE);
        let most_idle = idle.min_by_key(order_of_eviction);
        if let Some(activity) = most_idle.filter(|activity| !activity.is_authenticated()) {
            return Some(activity);
        }
        let heaviest = self.by_address.iter().max_by_key(|(_, count)| **count);
        let over_share = heaviest.filter(|(_, count)| **count > limits.per_address).map(|(other, _)| *other);
        match over_share {
            Some(other) if self.count(network) < limits.per_address => self
                .occupied
                .values()
                .filter(|occupied| occupied.network == other && !occupied.activity.is_busy())
                .map(|occupied| &occupied.activity)
                .min_by_key(order_of_eviction),
            _ if self.activities().all(Activity::is_authenticated) => most_idle,
            _ => None,
        }
    }
}

fn order_of_eviction(activity: &&Activity) -> (bool, u64) {
    (activity.is_authenticated(), activity.idle_since())
}

impl Slot {
    pub(crate) fn activity(&self) -> Activity {
        self.activity.clone()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut slots = self.shared.slots.lock();
        if let Some(Occupied { network, .. }) = slots.occupied.remove(&self.id)
            && let Some(count) = slots.by_address.get_mut(&network)
        {
            *count -= 1;
            if *count == 0 {
                slots.by_address.remove(&network);
            }
        }
        drop(slots);
        self.shared.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::{
        task::{JoinHandle, yield_now},
        time::timeout,
    };

    use super::*;
    use crate::net::activity::CloseReason;

    const TIMEOUTS: Timeouts =
        Timeouts { first_request: Duration::from_secs(10), idle: Duration::from_secs(60) };

    const LIGHT: &str = "203.0.113.9";
    const HEAVY: &str = "2001:db8::1";

    fn network(address: &str) -> ClientNetwork {
        address.parse::<IpAddr>().unwrap().into()
    }

    fn limiter(total: usize) -> ConnectionLimiter {
        ConnectionLimiter::new(ConnectionLimits::new(total, None), TIMEOUTS)
    }

    fn slot(limiter: &ConnectionLimiter) -> Slot {
        limiter.occupy(network(LIGHT)).unwrap()
    }

    /// The activity and the task of a connection that has a slot.
    struct Open {
        activity: Activity,
        task: JoinHandle<()>,
    }

    impl Open {
        /// Opens a connection. If all slots are taken, one must be evicted at once.
        async fn from(address: &str, limiter: &ConnectionLimiter) -> Self {
            let slot = match limiter.occupy(network(address)) {
                Some(slot) => slot,
                None => {
                    limiter.evict_for(network(address));
                    yield_now().await;
                    limiter.occupy(network(address)).expect("a connection is evicted")
                }
            };
            let activity = slot.activity();
            let task = tokio::spawn(async move {
                let _slot = slot;
                pending().await
            });
            activity.set_task(task.abort_handle());
            yield_now().await;
            Self { activity, task }
        }

        fn request(&self) {
            let _request = self.activity.start_request();
            self.activity.set_authenticated(true);
        }

        fn request_without_token(&self) {
            let _request = self.activity.start_request();
            self.activity.set_authenticated(false);
        }

        async fn assert_evicted(self) {
            assert!(self.task.await.unwrap_err().is_cancelled());
        }
    }

    fn assert_nothing_to_evict_for(address: &str, limiter: &ConnectionLimiter) {
        let slots = limiter.shared.slots.lock();
        assert!(slots.victim(network(address), limiter.limits).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_most_idle_connection_is_evicted_and_none_with_a_request_in_flight() {
        let limiter = limiter(3);
        let first = Open::from(LIGHT, &limiter).await;
        let second = Open::from(LIGHT, &limiter).await;
        let third = Open::from(LIGHT, &limiter).await;
        assert_nothing_to_evict_for(LIGHT, &limiter);
        let in_flight = first.activity.start_request();
        first.activity.set_authenticated(true);
        second.request();
        tokio::time::advance(MIN_IDLE).await;
        let fourth = Open::from(LIGHT, &limiter).await;
        third.assert_evicted().await;
        fourth.request();
        let fifth = Open::from(LIGHT, &limiter).await;
        second.assert_evicted().await;
        assert_nothing_to_evict_for(LIGHT, &limiter);
        fifth.request();
        tokio::time::advance(MIN_IDLE).await;
        let sixth = Open::from(LIGHT, &limiter).await;
        fourth.assert_evicted().await;
        for open in [first, fifth, sixth] {
            assert!(!open.task.is_finished());
            open.task.abort();
            open.assert_evicted().await;
        }
        drop(in_flight);
        let slots = limiter.shared.slots.lock();
        assert!(slots.occupied.is_empty() && slots.by_address.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_without_a_token_do_not_protect_a_connection() {
        let limiter = limiter(2);
        let without_token = Open::from(LIGHT, &limiter).await;
        let with_token = Open::from(LIGHT, &limiter).await;
        with_token.request();
        tokio::time::advance(2 * MIN_IDLE).await;
        without_token.request_without_token();
        let _in_flight = without_token.activity.start_request();
        let _new = Open::from(LIGHT, &limiter).await;
        without_token.assert_evicted().await;
        assert!(!with_token.task.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_a_token_is_not_evicted_while_one_without_occupies_a_slot() {
        let limiter = limiter(2);
        let with_token = Open::from(LIGHT, &limiter).await;
        with_token.request();
        tokio::time::advance(2 * MIN_IDLE).await;
        let without_token = Open::from(LIGHT, &limiter).await;
        assert_nothing_to_evict_for(LIGHT, &limiter);
        tokio::time::advance(MIN_IDLE).await;
        let new = Open::from(LIGHT, &limiter).await;
        without_token.assert_evicted().await;
        new.request();
        let _evicts_the_most_idle = Open::from(LIGHT, &limiter).await;
        with_token.assert_evicted().await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_with_more_than_its_share_loses_connections_first() {
        let limiter = limiter(4);
        let mut heavy = Vec::new();
        for number in 0..4 {
            // All addresses of one network count as one.
            let open = Open::from(&format!("{HEAVY}{number}"), &limiter).await;
            open.request();
            tokio::time::advance(MIN_IDLE / 10).await;
            heavy.push(open);
        }
        let busy = heavy.remove(0);
        let _in_flight = busy.activity.start_request();
        assert_nothing_to_evict_for(HEAVY, &limiter);
        let first = Open::from(LIGHT, &limiter).await;
        heavy.remove(0).assert_evicted().await;
        let second = Open::from(LIGHT, &limiter).await;
        heavy.remove(0).assert_evicted().await;
        assert_nothing_to_evict_for(LIGHT, &limiter);
        assert_eq!((limiter.count(network(LIGHT)), limiter.count(network(HEAVY))), (2, 2));
        for open in [busy, first, second, heavy.remove(0)] {
            assert!(!open.task.is_finished());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_thread_is_rated_by_its_active_connections() {
        let limiter = limiter(10);
        let mut connections = Vec::new();
        for thread in [0, 0, 0, 1, 7] {
            let open = Open::from(LIGHT, &limiter).await;
            open.activity.set_thread(thread);
            connections.push(open);
        }
        assert_eq!(limiter.active_per_thread(2), [3, 1]);
        tokio::time::advance(ACTIVE).await;
        assert_eq!(limiter.active_per_thread(2), [0, 0]);
        connections[3].request();
        let _in_flight = connections[0].activity.start_request();
        connections[0].activity.set_authenticated(true);
        assert_eq!(limiter.active_per_thread(2), [1, 1]);
        tokio::time::advance(ACTIVE).await;
        assert_eq!(limiter.active_per_thread(2), [1, 0]);
    }

    /// How long the reaper takes to close a connection.
    async fn time_to_close(limiter: &ConnectionLimiter, activity: &Activity) -> Duration {
        let begin = Instant::now();
        tokio::select! {
            never = limiter.reap() => match never {},
            reason = activity.close_requested() => assert_eq!(reason, CloseReason::TimedOut),
        }
        begin.elapsed()
    }

    fn assert_about(took: Duration, expected: Duration) {
        assert!(took >= expected && took <= expected + REAP_INTERVAL, "{took:?} instead of {expected:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_reaper_closes_connections_over_their_timeout() {
        let limiter = limiter(10);
        let unused = slot(&limiter);
        assert_about(time_to_close(&limiter, &unused.activity()).await, TIMEOUTS.first_request);
        let used = slot(&limiter);
        drop(used.activity().start_request());
        assert_about(time_to_close(&limiter, &used.activity()).await, TIMEOUTS.idle);
        let partial = slot(&limiter);
        drop(partial.activity().start_request());
        let soon = Duration::from_secs(5);
        partial.activity().set_deadline(Instant::now() + soon);
        assert_about(time_to_close(&limiter, &partial.activity()).await, soon);
    }

    #[tokio::test(start_paused = true)]
    async fn the_reaper_leaves_requests_in_flight_and_responses_alone() {
        let limiter = limiter(10);
        let slot = slot(&limiter);
        let activity = slot.activity();
        let request = activity.start_request();
        let streaming = activity.start_streaming();
        drop(request);
        let closed = timeout(10 * TIMEOUTS.idle, time_to_close(&limiter, &activity)).await;
        assert!(closed.is_err(), "the response is not complete");
        drop(streaming);
        let request = activity.start_request();
        let closed = timeout(10 * TIMEOUTS.idle, time_to_close(&limiter, &activity)).await;
        assert!(closed.is_err(), "the request is not answered");
        drop(request);
        assert_about(time_to_close(&limiter, &activity).await, TIMEOUTS.idle);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_arrives_after_the_reaper_decided_keeps_the_connection() {
        let limiter = limiter(10);
        let slot = slot(&limiter);
        let activity = slot.activity();
        let _reaped = timeout(TIMEOUTS.first_request + REAP_INTERVAL, limiter.reap()).await;
        drop(activity.start_request());
        assert_about(time_to_close(&limiter, &activity).await, TIMEOUTS.idle);
    }

    #[tokio::test]
    async fn a_shutdown_wakes_every_connection() {
        let limiter = limiter(10);
        let slots = [slot(&limiter), slot(&limiter)];
        let waiting = slots.each_ref().map(|slot| {
            let activity = slot.activity();
            tokio::spawn(async move { activity.close_requested().await })
        });
        yield_now().await;
        limiter.shut_down();
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap(), CloseReason::Shutdown);
        }
    }
}
