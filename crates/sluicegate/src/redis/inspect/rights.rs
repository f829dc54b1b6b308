//! The permissions of a user: those that the limiter needs, and dangerous ones.
//!
//! Permissions of the connected user are tested on an unused key with commands that change nothing. Permissions of other users, and those
//! that must not be tested, are queried with `ACL DRYRUN` (Redis 7.0 and newer).

use std::collections::BTreeMap;

use redis::{Cmd, FromRedisValue, Value};

use super::{InspectedServer, Shape};
use crate::{redis::keys::probe_key, store::StoreError};

/// The commands of the limiter: ACL name, test command, and where it is needed.
const NEEDED: [(&str, &str, Where); 20] = [
    ("evalsha", "EVALSHA 0000000000000000000000000000000000000000 1 KEY", Where::Everywhere),
    ("eval", "EVAL return(1) 1 KEY", Where::Everywhere),
    ("time", "TIME", Where::Everywhere),
    ("get", "GET KEY", Where::Everywhere),
    ("mget", "MGET KEY", Where::Everywhere),
    ("exists", "EXISTS KEY", Where::Everywhere),
    ("getrange", "GETRANGE KEY 0 0", Where::Everywhere),
    ("set", "SET KEY x XX PX 1000", Where::Everywhere),
    ("setrange", "SETRANGE KEY 0 NOTHING", Where::Everywhere),
    ("pexpire", "PEXPIRE KEY 1000", Where::Everywhere),
    ("zadd", "ZADD KEY XX 1 x", Where::Everywhere),
    ("zremrangebyscore", "ZREMRANGEBYSCORE KEY -inf -inf", Where::Everywhere),
    ("zcard", "ZCARD KEY", Where::Everywhere),
    ("unlink", "UNLINK KEY", Where::Everywhere),
    ("ping", "PING", Where::Everywhere),
    ("role", "ROLE", Where::Watched),
    ("info", "INFO server", Where::Everywhere),
    ("select", "SELECT DATABASE", Where::OtherDatabases),
    ("cluster|slots", "CLUSTER SLOTS", Where::Clusters),
    ("asking", "ASKING", Where::Clusters),
];

/// The further commands of holds.
const HOLDS: [(&str, &str); 7] = [
    ("del", "DEL KEY"),
    ("pttl", "PTTL KEY"),
    ("zcount", "ZCOUNT KEY 0 0"),
    ("zrangebyscore", "ZRANGEBYSCORE KEY 0 0"),
    ("zrem", "ZREM KEY x"),
    ("zrevrange", "ZREVRANGE KEY 0 0"),
    ("zscore", "ZSCORE KEY x"),
];

/// Commands that the user of a limiter should not have. Only the last one is ever sent: no server has that setting.
const DANGEROUS: [(&str, &str); 5] = [
    ("flushall", "FLUSHALL"),
    ("keys", "KEYS KEY"),
    ("shutdown", "SHUTDOWN"),
    ("acl|setuser", "ACL SETUSER sluicegate-doctor"),
    (CONFIG_SET, "CONFIG SET sluicegate-no-such-setting 1"),
];

const CONFIG_SET: &str = "config|set";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Everywhere,
    Watched,
    OtherDatabases,
    Clusters,
}

/// The user whose permissions are inspected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AclSubject<'a> {
    /// The connected user.
    Own,
    /// The user of this name.
    Of(&'a str),
}

/// The permissions of a user.
#[derive(Clone, Debug)]
pub struct Rights {
    /// The user, if it may be queried.
    pub user: Result<User, StoreError>,
    /// The permissions that the limiter needs.
    pub needed: Vec<Right>,
    /// The further permissions that holds and concurrency limits need.
    pub holds: Vec<Right>,
    /// Dangerous permissions.
    pub dangerous: Vec<Right>,
    /// Whether it may read keys with another prefix.
    pub other_keys: Permission,
}

/// An ACL user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Its name.
    pub name: String,
    /// Whether it needs no password.
    pub needs_no_password: bool,
    /// The permitted commands, as ACL rules.
    pub commands: String,
}

/// One command and its permission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Right {
    /// Its name in ACL rules: `cluster|slots`.
    pub command: &'static str,
    /// Whether it is permitted.
    pub permission: Permission,
}

/// Whether a command is permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Permitted.
    Granted,
    /// Not permitted.
    Denied,
    /// Unknown.
    Unknown,
}

impl InspectedServer {
    /// Returns the permissions of a user.
    pub async fn rights(&self, whose: AclSubject<'_>) -> Rights {
        let user = self.user(whose).await;
        let name = match whose {
            AclSubject::Own => user.as_ref().ok().map(|user| user.name.clone()),
            AclSubject::Of(name) => Some(name.to_owned()),
        };
        let mut needed = Vec::new();
        for (command, words, place) in NEEDED {
            if self.is_at(place) {
                needed.push(Right { command, permission: self.permission(whose, words).await });
            }
        }
        let mut holds = Vec::new();
        for (command, words) in HOLDS {
            holds.push(Right { command, permission: self.permission(whose, words).await });
        }
        let mut dangerous = Vec::new();
        for (command, words) in DANGEROUS {
            let mut permission = match &name {
                Some(name) => self.dry_run(name, words).await,
                None => Permission::Unknown,
            };
            if permission == Permission::Unknown && whose == AclSubject::Own && command == CONFIG_SET {
                permission = self.try_setting(words).await;
            }
            dangerous.push(Right { command, permission });
        }
        let elsewhere = format!("GET sluicegate-doctor:not-ours:{{{}}}", self.tag);
        let other_keys = match whose {
            AclSubject::Own => permission(self.ask(&self.request(&elsewhere)).await),
            AclSubject::Of(name) => self.dry_run(name, &elsewhere).await,
        };
        Rights { user, needed, holds, dangerous, other_keys }
    }

    /// Returns whether a user may run a command that changes nothing.
    async fn permission(&self, whose: AclSubject<'_>, words: &str) -> Permission {
        match whose {
            AclSubject::Own => permission(self.ask(&self.request(words)).await),
            AclSubject::Of(name) => self.dry_run(name, words).await,
        }
    }

    fn is_at(&self, place: Where) -> bool {
        match place {
            Where::Everywhere => true,
            Where::Watched => self.shape == Shape::Watched,
            Where::OtherDatabases => self.database != 0,
            Where::Clusters => self.shape == Shape::Cluster,
        }
    }

    async fn user(&self, whose: AclSubject<'_>) -> Result<User, StoreError> {
        let name = match whose {
            AclSubject::Of(name) => name.to_owned(),
            AclSubject::Own => {
                let reply = self.ask(redis::cmd("ACL").arg("WHOAMI")).await?;
                String::from_redis_value(reply).map_err(|_| self.unexpected_reply("ACL WHOAMI"))?
            }
        };
        let reply = self.ask(redis::cmd("ACL").arg("GETUSER").arg(&name)).await?;
        if reply == Value::Nil {
            let detail = format!("there is no user {name:?}");
            return Err(StoreError::Rejected { code: "ERR".to_owned(), detail });
        }
        let unexpected_reply = || self.unexpected_reply("ACL GETUSER");
        let mut fields =
            BTreeMap::<String, Value>::from_redis_value(reply).map_err(|_| unexpected_reply())?;
        let flags = fields.remove("flags").ok_or_else(unexpected_reply)?;
        let commands = fields.remove("commands").ok_or_else(unexpected_reply)?;
        let flags = Vec::<String>::from_redis_value(flags).map_err(|_| unexpected_reply())?;
        Ok(User {
            name,
            needs_no_password: flags.iter().any(|flag| flag == "nopass"),
            commands: String::from_redis_value(commands).map_err(|_| unexpected_reply())?,
        })
    }

    async fn dry_run(&self, user: &str, words: &str) -> Permission {
        let mut request = redis::cmd("ACL");
        request.arg("DRYRUN").arg(user);
        match self.ask(&self.with_words(request, words)).await.map(String::from_redis_value) {
            Ok(Ok(reply)) if reply == "OK" => Permission::Granted,
            Ok(Ok(_)) => Permission::Denied,
            Ok(Err(_)) | Err(_) => Permission::Unknown,
        }
    }

    /// If the server rejects only the unknown setting, it would accept another one.
    async fn try_setting(&self, words: &str) -> Permission {
        match self.ask(&self.request(words)).await {
            Err(StoreError::Rejected { code, detail })
                if code == "ERR" && !detail.contains("unknown command") =>
            {
                Permission::Granted
            }
            Err(StoreError::Rejected { .. }) => Permission::Denied,
            _ => Permission::Unknown,
        }
    }

    fn request(&self, words: &str) -> Cmd {
        self.with_words(Cmd::new(), words)
    }

    fn with_words(&self, mut request: Cmd, words: &str) -> Cmd {
        for word in words.split(' ') {
            match word {
                "KEY" => request.arg(probe_key(&self.prefix, &self.tag)),
                "NOTHING" => request.arg(""),
                "DATABASE" => request.arg(self.database),
                _ => request.arg(word),
            };
        }
        request
    }
}

/// A permitted command succeeds or fails for another reason: Redis checks permissions first.
fn permission(answer: Result<Value, StoreError>) -> Permission {
    match answer {
        Ok(_) => Permission::Granted,
        Err(StoreError::Rejected { code, .. }) if code == "NOPERM" => Permission::Denied,
        Err(StoreError::Rejected { detail, .. }) if detail.starts_with("unknown command") => {
            Permission::Denied
        }
        Err(StoreError::Rejected { .. }) => Permission::Granted,
        Err(_) => Permission::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const PAGE: &str = include_str!("../../../../../docs/redis.md");

    #[test]
    fn the_documented_user_has_exactly_the_needed_permissions() {
        let line =
            PAGE.lines().find(|line| line.starts_with("user sluicegate on >change-me ~sg1:*")).unwrap();
        let documented: BTreeSet<&str> = line.split(' ').filter_map(|word| word.strip_prefix('+')).collect();
        // the client name is optional
        let holds = HOLDS.iter().map(|(command, _)| *command);
        let needed =
            NEEDED.iter().map(|(command, ..)| *command).chain(holds).chain(["client|setname"]).collect();
        assert_eq!(documented, needed);
    }
}
