//! Checks that the limiter's user has the required permissions and no more.

use sluicegate::{
    StoreError,
    redis::inspect::{Permission, Right, Rights},
};

use super::{
    super::finding::{Finding, see},
    Context,
};

pub(super) fn check(rights: &Rights, context: &Context<'_>) -> Vec<Finding> {
    let known = rights.user.as_ref().ok().map(|user| user.name.as_str());
    let name = context.user.or(known);
    let shown = name.map_or_else(|| "the user".to_owned(), |name| format!("the user {name:?}"));
    if let (Some(name), Err(StoreError::Rejected { detail, .. })) = (context.user, &rights.user)
        && detail.starts_with("there is no user")
    {
        let finding = Finding::problem("permissions", format!("there is no user {name:?}"))
            .why("connections as this user are rejected, and the failure policies decide")
            .remedy("use a user of ACL LIST, or create it with ACL SETUSER", see::USER);
        return vec![finding];
    }
    let mut findings = vec![needed(&rights.needed, &shown, name)];
    findings.extend(holds(&rights.holds, &shown, name));
    findings.push(excess(rights, &shown, context.prefix));
    if let Ok(user) = &rights.user
        && user.needs_no_password
    {
        findings.push(
            Finding::problem("no-password", format!("{shown} needs no password"))
                .why("every client that reaches this server can act as this user")
                .remedy(
                    "ACL SETUSER sluicegate on >PASSWORD with the permissions listed in the documentation, then ACL SETUSER \
                     default off, or CONFIG SET requirepass PASSWORD",
                    see::USER,
                ),
        );
    }
    findings
}

fn with(rights: &[Right], permission: Permission) -> Vec<&'static str> {
    rights.iter().filter(|right| right.permission == permission).map(|right| right.command).collect()
}

fn needed(needed: &[Right], shown: &str, name: Option<&str>) -> Finding {
    let (missing, unknown) = (with(needed, Permission::Denied), with(needed, Permission::Unknown));
    if !missing.is_empty() {
        let grants: Vec<String> = missing.iter().map(|command| format!("+{command}")).collect();
        let name = name.unwrap_or("NAME");
        return Finding::problem("permissions", format!("{shown} lacks permissions: {}", missing.join(", ")))
            .why("decisions, resets or the instance count fail, and the failure policies decide")
            .remedy(format!("ACL SETUSER {name} {}", grants.join(" ")), see::USER);
    }
    if !unknown.is_empty() {
        return Finding::unknown("permissions", format!("permissions of {shown} not checked")).remedy(
            "run the doctor as that user; or, on Redis 7.0 or newer, as one with +acl|dryrun +acl|getuser",
            see::DOCTORS_USER,
        );
    }
    Finding::fine("permissions", format!("{shown} has the required permissions"))
}

/// Reports missing permissions that only holds need.
fn holds(needed: &[Right], shown: &str, name: Option<&str>) -> Option<Finding> {
    let missing = with(needed, Permission::Denied);
    let grants: Vec<String> = missing.iter().map(|command| format!("+{command}")).collect();
    let name = name.unwrap_or("NAME");
    (!missing.is_empty()).then(|| {
        let what = format!("{shown} lacks permissions for holds: {}", missing.join(", "));
        Finding::advice("hold-permissions", what)
            .why("holds and concurrency rules fail, and the failure policies decide")
            .remedy(format!("to use holds, ACL SETUSER {name} {}", grants.join(" ")), see::USER)
    })
}

/// The ACL rule of a user with all commands.
const ALL_COMMANDS: &str = "+@all";

fn excess(rights: &Rights, shown: &str, prefix: &str) -> Finding {
    let may_all = rights.user.as_ref().is_ok_and(|user| user.commands == ALL_COMMANDS);
    let dangerous = with(&rights.dangerous, Permission::Granted);
    let other_keys = rights.other_keys == Permission::Granted;
    let remedy = format!(
        "create a user for sluicegate with ~{prefix}1:* and the commands listed in the documentation; to run the doctor as a \
         user with more permissions, set --user to sluicegate's user"
    );
    let why = "a leaked password allows deleting every counter (FLUSHALL), or taking over the server";
    if may_all || !dangerous.is_empty() {
        let what = match (may_all, other_keys) {
            (true, true) => format!("{shown} has all commands and all keys"),
            (true, false) => {
                format!("{shown} has all commands on sluicegate's keys, including {}", dangerous.join(", "))
            }
            (false, _) => format!("{shown} has unnecessary permissions: {}", dangerous.join(", ")),
        };
        return Finding::problem("excess-permissions", what).why(why).remedy(remedy, see::USER);
    }
    if other_keys {
        return Finding::advice("excess-permissions", format!("{shown} can read keys of other applications"))
            .why("a leaked password allows reading all other data on this server")
            .remedy(remedy, see::USER);
    }
    Finding::fine("excess-permissions", format!("{shown} has no dangerous permissions"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sluicegate::{
        StoreError,
        redis::inspect::{Permission::*, Shape, User},
    };

    use super::{super::tests::issues, *};
    use crate::doctor::finding::Severity::{self, Advice, Problem};

    fn found(
        user: Option<(&str, bool)>,
        needed: Permission,
        flush: Permission,
        other_keys: Permission,
    ) -> Vec<(Severity, &'static str)> {
        let denied = StoreError::Rejected { code: "NOPERM".to_owned(), detail: String::new() };
        let user = user.map(|(commands, needs_no_password)| User {
            name: "sluicegate".to_owned(),
            needs_no_password,
            commands: commands.to_owned(),
        });
        let right = |command, permission| vec![Right { command, permission }];
        let rights = Rights {
            user: user.ok_or(denied),
            needed: right("eval", needed),
            holds: right("zrem", Granted),
            dangerous: right("flushall", flush),
            other_keys,
        };
        let context = Context {
            shape: Shape::Single,
            is_encrypted: false,
            deadline: Duration::from_millis(10),
            prefix: "sg",
            user: None,
        };
        issues(&check(&rights, &context))
    }

    #[test]
    fn missing_and_excess_permissions_are_problems() {
        let narrow = Some(("-@all +eval", false));
        assert_eq!(found(narrow, Granted, Denied, Denied), []);
        assert_eq!(found(None, Granted, Unknown, Denied), []);
        assert_eq!(found(narrow, Denied, Denied, Denied), [(Problem, "permissions")]);
        assert_eq!(found(None, Unknown, Unknown, Unknown), [(Severity::Unknown, "permissions")]);
        assert_eq!(found(narrow, Granted, Granted, Denied), [(Problem, "excess-permissions")]);
        assert_eq!(found(narrow, Granted, Denied, Granted), [(Advice, "excess-permissions")]);
        assert_eq!(
            found(Some(("+@all", false)), Granted, Unknown, Granted),
            [(Problem, "excess-permissions")]
        );
        let lacks = holds(&[Right { command: "zrem", permission: Denied }], "it", Some("me")).unwrap();
        assert_eq!((lacks.severity, &*lacks.remedy), (Advice, "to use holds, ACL SETUSER me +zrem"));
        let open = [(Problem, "excess-permissions"), (Problem, "no-password")];
        assert_eq!(found(Some(("+@all", true)), Granted, Granted, Granted), open);
    }
}
