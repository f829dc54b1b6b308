//! Verifies that every key of a server has a TTL.

use redis::RedisResult;

use super::Server;

impl Server {
    /// Asserts that every key of every database has a TTL.
    ///
    /// # Panics
    ///
    /// When a key has no TTL (the message lists such keys), or the server does not answer.
    pub fn assert_every_key_expires(&self) {
        self.check_every_key_expires().unwrap_or_else(|message| panic!("{message}"));
    }

    pub(super) fn check_every_key_expires(&self) -> Result<(), String> {
        let keys = self.keys_without_ttl().map_err(|error| {
            format!(
                "{self} could not be checked for keys without a TTL: {error}; \
                 let it answer again before the test ends, or end it with kill()"
            )
        })?;
        if keys.is_empty() {
            return Ok(());
        }
        Err(format!("{self} holds {} keys without a TTL: {}", keys.len(), keys.join(", ")))
    }

    fn keys_without_ttl(&self) -> RedisResult<Vec<String>> {
        let mut connection = self.try_connection()?;
        let keyspace: String = redis::cmd("INFO").arg("keyspace").query(&mut connection)?;

        let mut offenders = Vec::new();
        for (database, without_ttl) in keyspace.lines().filter_map(count_without_ttl) {
            // The count suffices on a cluster node too, which does not report the TTL of keys in a migrating slot.
            if without_ttl == 0 {
                continue;
            }
            if database != "0" {
                redis::cmd("SELECT").arg(database).exec(&mut connection)?;
            }
            for key in scan(&mut connection)? {
                let ttl_millis: RedisResult<i64> = redis::cmd("PTTL").arg(&key).query(&mut connection);
                let name = String::from_utf8_lossy(&key);
                match ttl_millis {
                    // No TTL. -2 is a key that has expired since the scan, 0 one in its last millisecond.
                    Ok(-1) => offenders.push(format!("{name:?} in database {database}")),
                    Ok(_) => {}
                    // Some key has no TTL, but a cluster node does not report it for keys in a slot that it does not
                    // serve.
                    Err(error) => {
                        offenders.push(format!("perhaps {name:?} in database {database} ({error})"))
                    }
                }
            }
        }
        Ok(offenders)
    }
}

/// Parses a line of `INFO keyspace`, such as `db0:keys=3,expires=2,avg_ttl=0`: the database, and how many of its keys
/// have no TTL.
fn count_without_ttl(line: &str) -> Option<(&str, u64)> {
    let (database, counts) = line.strip_prefix("db")?.split_once(':')?;
    let count = |name: &str| -> Option<u64> {
        counts.split(',').find_map(|count| count.strip_prefix(name))?.parse().ok()
    };
    Some((database, count("keys=")? - count("expires=")?))
}

/// Lists every key of the selected database, some of them twice, as `SCAN` does.
fn scan(connection: &mut redis::Connection) -> RedisResult<Vec<Vec<u8>>> {
    let mut keys = Vec::new();
    let mut cursor = 0_u64;
    loop {
        let (next, page): (u64, Vec<Vec<u8>>) =
            redis::cmd("SCAN").arg(cursor).arg("COUNT").arg(1_000).query(connection)?;
        keys.extend(page);
        if next == 0 {
            return Ok(keys);
        }
        cursor = next;
    }
}
