//! The slot map: the node of each slot.

use redis::{FromRedisValue, Value};

use super::super::url::Node;
use crate::{hashing::random, key::Key};

/// The number of slots of every cluster.
pub(super) const SLOTS: u16 = 16_384;

/// Returns the slot of a counter, which depends only on its tag.
pub(super) fn slot_of(key: &Key) -> u16 {
    slot_of_tag(&format!("{:08x}", key.tag()))
}

/// Returns the slot of a tag.
pub(super) fn slot_of_tag(tag: &str) -> u16 {
    crc16(tag.as_bytes()) % SLOTS
}

/// CRC-16/XMODEM, as in the Cluster specification.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ u16::from(*byte) << 8,
            |crc, _| {
                if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
            },
        )
    })
}

/// Number of tags that are tried to find one of a node: enough for a thousand nodes, in a millisecond.
const MAX_TAGS: u64 = 16_384;

/// The node of each slot.
#[derive(Default)]
pub(super) struct SlotMap {
    nodes: Vec<Node>,
    /// For each slot, the index of its node plus one; 0 without a node. Empty until the first refresh.
    owners: Vec<u16>,
}

impl SlotMap {
    pub(super) fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    pub(super) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub(super) fn owner(&self, slot: u16) -> Option<&Node> {
        let place = *self.owners.get(usize::from(slot))?;
        self.nodes.get(usize::from(place.checked_sub(1)?))
    }

    /// Returns a random tag in a slot of the node; `None` if it serves no or very few slots.
    pub(super) fn tag_at(&self, node: &Node) -> Option<String> {
        let first = random() % u64::from(u32::MAX);
        let mut tags = (0..MAX_TAGS).map(|number| format!("probe{}", first + number));
        tags.find(|tag| self.owner(slot_of_tag(tag)) == Some(node))
    }

    /// Records a redirection.
    pub(super) fn set_owner(&mut self, slot: u16, node: &Node) {
        let place = self.place_of(node);
        if let Some(owner) = self.owners.get_mut(usize::from(slot)) {
            *owner = place;
        }
    }

    fn place_of(&mut self, node: &Node) -> u16 {
        let place = self.nodes.iter().position(|known| known == node).unwrap_or_else(|| {
            self.nodes.push(node.clone());
            self.nodes.len() - 1
        });
        u16::try_from(place + 1).unwrap_or(0)
    }

    /// Parses the reply of `CLUSTER SLOTS` from `queried`: the first and last slot of each range, and its nodes, the primary first. Returns
    /// `None` if it is malformed or empty.
    pub(super) fn read(reply: Value, queried: &Node) -> Option<Self> {
        let mut map = Self { nodes: Vec::new(), owners: vec![0; usize::from(SLOTS)] };
        let ranges = Vec::<Vec<Value>>::from_redis_value(reply).ok()?;
        for range in &ranges {
            let [first, last, primary, ..] = &range[..] else { return None };
            let (first, last) = (number(first)?, number(last)?);
            let Value::Array(primary) = primary else { return None };
            let [host, port, ..] = &primary[..] else { return None };
            let host = Option::<String>::from_redis_value(host.clone()).ok()?;
            let node = place(host.unwrap_or_default(), number(port)?, queried);
            let place = map.place_of(&node);
            map.owners.get_mut(usize::from(first)..=usize::from(last))?.fill(place);
        }
        (!ranges.is_empty()).then_some(map)
    }
}

fn number(value: &Value) -> Option<u16> {
    u16::from_redis_value(value.clone()).ok()
}

/// Returns a node as named in a reply; a node omits its own address if it has not been configured.
fn place(host: String, port: u16, queried: &Node) -> Node {
    if host.is_empty() || host == "?" {
        Node { host: queried.host.clone(), port }
    } else {
        Node { host, port }
    }
}

/// Parses the target of `MOVED <slot> <host>:<port>` and `ASK …`.
pub(super) fn redirection(detail: &str, queried: &Node) -> Option<Node> {
    let (host, port) = detail.split_ascii_whitespace().nth(1)?.rsplit_once(':')?;
    Some(place(host.to_owned(), port.parse().ok()?, queried))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: u16) -> Node {
        Node { host: host.to_owned(), port }
    }

    #[test]
    fn slots_match_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(crc16(b"user1000") % SLOTS, 3443);
    }

    #[test]
    fn redirections_name_a_node_or_the_same_host() {
        let queried = node("h", 1);
        assert_eq!(redirection("3999 10.0.0.1:6381", &queried), Some(node("10.0.0.1", 6381)));
        assert_eq!(redirection("3999 ::1:6381", &queried), Some(node("::1", 6381)));
        assert_eq!(redirection("3999 :6381", &queried), Some(node("h", 6381)));
        assert_eq!(redirection("3999 ?:6381", &queried), Some(node("h", 6381)));
        assert_eq!(redirection("3999", &queried), None);
    }

    #[test]
    fn a_map_is_parsed_and_updated() {
        let text = |text: &str| Value::BulkString(text.into());
        let range = |first, last, host: Value, port| {
            let primary = Value::Array(vec![host, Value::Int(port), text("id")]);
            let replica = Value::Array(vec![text("replica"), Value::Int(9), text("id")]);
            Value::Array(vec![Value::Int(first), Value::Int(last), primary, replica])
        };
        let reply = Value::Array(vec![range(0, 9, text("a"), 1), range(11, 11, Value::Nil, 2)]);
        let mut map = SlotMap::read(reply, &node("h", 7)).unwrap();
        let owners = [0, 9, 10, 11, 12].map(|slot| map.owner(slot).cloned());
        let (a, h) = (Some(node("a", 1)), Some(node("h", 2)));
        assert_eq!(owners, [a.clone(), a, None, h, None]);
        map.set_owner(10, &node("b", 3));
        assert_eq!(map.owner(10), Some(&node("b", 3)));

        let reply = Value::Array(vec![range(0, 8_000, text("a"), 1), range(8_001, 8_100, text("b"), 2)]);
        let map = SlotMap::read(reply, &node("h", 7)).unwrap();
        for served in [node("a", 1), node("b", 2)] {
            let tag = map.tag_at(&served).unwrap();
            assert_eq!(map.owner(slot_of_tag(&tag)), Some(&served));
        }
        assert_eq!(map.tag_at(&node("c", 3)), None);

        assert!(SlotMap::read(Value::Array(vec![]), &node("h", 7)).is_none());
        assert!(SlotMap::read(Value::Array(vec![range(0, 20_000, text("a"), 1)]), &node("h", 7)).is_none());
        assert!(SlotMap::default().owner(5).is_none());
    }
}
