//! Fills the absent fields of a rule from `[defaults]`. A default applies only to rules that support the field.

use sluicegate_core::{Algorithm, OnExpiry};

use super::{
    schema::Rule,
    toml_reader::Field,
    values::{AnchorValue, Keyword, WindowValue},
};
use crate::window::WrittenWindow;

/// The algorithm of a rule; `None` if it is not the name of one, which has been reported.
pub(super) fn algorithm(rule: &Rule) -> Option<Algorithm> {
    match &rule.algorithm {
        Field::Absent => Some(Algorithm::TokenBucket),
        written => written.get().map(|word| word.0),
    }
}

/// Fills absent fields with the defaults. Overrides are excluded because they accumulate.
pub(super) fn with_defaults(own: &Rule, defaults: &Rule) -> Rule {
    let mut rule = Rule {
        name: own.name.clone(),
        when: own.when.or(&defaults.when),
        unless: own.unless.or(&defaults.unless),
        per: own.per.or(&defaults.per),
        algorithm: own.algorithm.or(&defaults.algorithm),
        amount: own.amount.or(&defaults.amount),
        unit: own.unit.or(&defaults.unit),
        cost: own.cost.or(&defaults.cost),
        on_store_failure: own.on_store_failure.or(&defaults.on_store_failure),
        ttl: own.ttl.or(&defaults.ttl),
        hold: own.hold.or(&defaults.hold),
        shadow: own.shadow.or(&defaults.shadow),
        overdraft: own.overdraft.clone(),
        tag: own.tag.or(&defaults.tag),
        absent: own.absent.or(&defaults.absent),
        exact: own.exact.or(&defaults.exact),
        window: own.window.clone(),
        zone: own.zone.clone(),
        anchor: own.anchor.clone(),
        burst: own.burst.clone(),
        stagger: own.stagger.clone(),
        lease: own.lease.clone(),
        lease_for: own.lease_for.clone(),
        on_expiry: own.on_expiry.clone(),
        max_excess: own.max_excess.clone(),
        overrides_file: Field::Absent,
        r#override: Field::Absent,
    };
    let algorithm = algorithm(&rule).unwrap_or(Algorithm::TokenBucket);
    if algorithm.properties().has_window {
        add_window_defaults(&mut rule, algorithm, defaults);
    }
    rule
}

/// Fills the fields of algorithms with a window.
fn add_window_defaults(rule: &mut Rule, algorithm: Algorithm, defaults: &Rule) {
    rule.window = rule.window.or(&defaults.window);
    rule.zone = rule.zone.or(&defaults.zone);
    let unit = match rule.window.get() {
        Some(WindowValue(WrittenWindow::Calendar(unit))) => Some(*unit),
        _ => None,
    };
    let fits = |anchor: &AnchorValue| unit.is_some_and(|unit| unit.check_anchor(anchor.0).is_ok());
    if defaults.anchor.get().is_some_and(fits) {
        rule.anchor = rule.anchor.or(&defaults.anchor);
    }
    if algorithm.properties().has_burst {
        rule.burst = rule.burst.or(&defaults.burst);
    }
    if algorithm.properties().has_phase && unit.is_none() {
        rule.stagger = rule.stagger.or(&defaults.stagger);
    }
    // a rule that releases expired holds has no lease
    if rule.on_expiry.get() != Some(&Keyword(OnExpiry::Release)) {
        rule.lease = rule.lease.or(&defaults.lease);
        rule.lease_for = rule.lease_for.or(&defaults.lease_for);
    }
    rule.overdraft = rule.overdraft.or(&defaults.overdraft);
    rule.on_expiry = rule.on_expiry.or(&defaults.on_expiry);
    rule.max_excess = rule.max_excess.or(&defaults.max_excess);
}
