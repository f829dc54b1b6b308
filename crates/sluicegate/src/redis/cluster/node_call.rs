//! Calls over several slots of one node.
//!
//! Redis rejects `KEYS` of several slots, but lets a script access other keys on slots that its node serves. The script reads every key
//! before it writes anything, so it runs completely or not at all: a key that the node does not serve, or that has migrated, is an
//! error. A call that could not run is repeated with one call per slot.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Cluster, decide::Each};
use crate::{
    check::Check,
    redis::{
        bytes,
        connection::{Asking, CallFailure, RedisRequest},
        script::{CallTimes, MAX_BATCH, decode, encode, is_misrouted},
        url::Node,
    },
    store::{StoreError, per_check},
};

/// How long a node gets one call per slot after a call over several slots could not run: a migration takes a while.
const ONE_SLOT_PERIOD: Duration = Duration::from_millis(100);
/// Error codes of a node that did not run a call because of where its keys are.
const REDIRECTIONS: [&str; 6] = ["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "CROSSSLOT", "READONLY"];
/// Part of the error message of a script that accesses a key which is not on its node.
const NON_LOCAL_KEY: &str = "non local key";

/// The nodes that currently get one call per slot, and until when. At most one entry per node of the cluster lasts longer than
/// [`ONE_SLOT_PERIOD`].
#[derive(Default)]
pub(super) struct OneSlotNodes(Mutex<HashMap<Node, Instant>>);

impl OneSlotNodes {
    fn contains(&self, node: &Node) -> bool {
        self.0.lock().get(node).is_some_and(|until| Instant::now() < *until)
    }

    fn insert(&self, node: &Node) {
        let now = Instant::now();
        let mut nodes = self.0.lock();
        nodes.retain(|_, until| now < *until);
        nodes.insert(node.clone(), now + ONE_SLOT_PERIOD);
    }
}

/// Checks for one node, slot by slot.
pub(super) struct NodeChecks<T> {
    /// Absent if there is one call per slot.
    node: Option<Node>,
    slots: Vec<SlotChecks>,
    pub(super) checks: Vec<Check>,
    /// A value of the caller for each check.
    pub(super) tags: Vec<T>,
}

/// How many of the checks are on a slot.
struct SlotChecks {
    slot: u16,
    checks: usize,
}

impl Cluster {
    /// Returns the node that serves all of these slots, if one does and accepts calls over several slots.
    pub(super) fn common_node(&self, mut slots: impl Iterator<Item = u16>) -> Option<Node> {
        let map = self.map.read();
        let node = map.owner(slots.next()?)?;
        let is_common =
            slots.all(|slot| map.owner(slot) == Some(node)) && !self.one_slot_nodes.contains(node);
        is_common.then(|| node.clone())
    }

    /// Groups checks that are each on one slot by the node that serves it. Those of one slot keep their order.
    pub(super) fn group_by_node<T>(
        &self,
        by_slot: impl IntoIterator<Item = (u16, Vec<(T, Check)>)>,
    ) -> Vec<NodeChecks<T>> {
        let mut groups: Vec<NodeChecks<T>> = Vec::new();
        for (slot, tagged) in by_slot {
            let node = self.common_node([slot].into_iter());
            let tiers: usize = tagged.iter().map(|(_, check)| check.tiers().len()).sum();
            let known = groups
                .iter()
                .position(|group| node.is_some() && group.node == node && group.tiers() + tiers <= MAX_BATCH);
            let place = known.unwrap_or_else(|| {
                groups.push(NodeChecks { node, slots: Vec::new(), checks: Vec::new(), tags: Vec::new() });
                groups.len() - 1
            });
            let group = &mut groups[place];
            group.slots.push(SlotChecks { slot, checks: tagged.len() });
            let (tags, checks): (Vec<T>, Vec<Check>) = tagged.into_iter().unzip();
            group.tags.extend(tags);
            group.checks.extend(checks);
        }
        groups
    }

    /// Decides the checks of a group in one call, or in one call per slot if that cannot run.
    pub(super) async fn call_group<T>(
        self: &Arc<Self>,
        group: &NodeChecks<T>,
        prefix: &str,
        times: CallTimes,
    ) -> Each {
        if let (Some(node), [_, _, ..]) = (&group.node, &group.slots[..])
            && let Some(decided) = self.call_node(node, prefix, &group.checks, times).await
        {
            return decided;
        }
        let mut rest = &group.checks[..];
        let calls = group.slots.iter().map(|slot| {
            let (checks, others) = rest.split_at(slot.checks);
            rest = others;
            self.call(slot.slot, prefix, checks, times)
        });
        let calls: Vec<_> = calls.collect();
        join_all(calls).await.into_iter().flatten().collect()
    }

    /// Decides checks on several slots of one node in one step. Returns `None` if nothing ran and one call per slot may.
    ///
    /// A redirection is not followed: after `ASKING`, a node would create keys of every slot that it imports, although
    /// they still exist on the node that they come from.
    pub(super) async fn call_node(
        self: &Arc<Self>,
        node: &Node,
        prefix: &str,
        checks: &[Check],
        times: CallTimes,
    ) -> Option<Each> {
        let decided = match encode(prefix, checks, times) {
            Err(error) => Err(error),
            Ok(call) => {
                let call = call.over_several_slots();
                let reply = self.connection(node).send(RedisRequest::Script(&call), Asking::No).await;
                match reply.and_then(bytes) {
                    Ok(reply) if is_misrouted(&reply) => {
                        self.one_slot_nodes.insert(node);
                        return None;
                    }
                    Ok(reply) => decode(&reply, &call, checks),
                    Err(CallFailure::NotSent(_)) => return None,
                    Err(CallFailure::Rejected { code, .. }) if REDIRECTIONS.contains(&&*code) => {
                        self.one_slot_nodes.insert(node);
                        return None;
                    }
                    // the script reports a key that it cannot read, so this was a write, perhaps not the first one
                    Err(CallFailure::Rejected { code, detail }) if detail.contains(NON_LOCAL_KEY) => {
                        Err(StoreError::Ambiguous(format!("{node}: {code} {detail}")))
                    }
                    Err(failure) => {
                        if matches!(failure, CallFailure::ReplyLost(_)) {
                            self.refresh_soon();
                        }
                        Err(failure.into())
                    }
                }
            }
        };
        Some(per_check(decided, checks.len()))
    }
}

impl<T> NodeChecks<T> {
    fn tiers(&self) -> usize {
        self.checks.iter().map(|check| check.tiers().len()).sum()
    }
}
