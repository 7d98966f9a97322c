//! What is known of the servers of a quorum: which of them may vote.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Clock, Error, ErrorKind, Result, drift, store::unpoisoned};
use lockkit_redis::ServerFacts;
use lockkit_redlock::{RedlockConfig, RestartPolicy};

/// What the servers said of themselves on their latest connections.
pub(super) struct Roster {
    known: Mutex<Vec<Option<Known>>>,
    restart_policies: Vec<RestartPolicy>,
    clock: Arc<dyn Clock>,
    durable: Option<bool>,
    /// For how long after its start a node does not vote that may have lost leases.
    kept_out: Duration,
    /// Fences were said to be strict, so that from now on all nodes have to be durable.
    strict: AtomicBool,
}

/// A run of a server.
#[derive(Clone)]
struct Known {
    facts: ServerFacts,
    is_whole: bool,
}

impl Roster {
    /// Nothing is known yet of so many nodes, but whether they were declared to be durable.
    pub(super) fn new(nodes: usize, config: &RedlockConfig, durable: Option<bool>, delayed_restart: bool) -> Self {
        let kept_out = config.max_ttl.saturating_add(drift(config.max_ttl));
        Self {
            known: Mutex::new(vec![None; nodes]),
            restart_policies: (0..nodes).map(|_| RestartPolicy::new()).collect(),
            clock: Arc::clone(&config.clock),
            durable,
            kept_out: if delayed_restart { kept_out } else { Duration::ZERO },
            strict: AtomicBool::new(false),
        }
    }

    /// Whether a new connection to a node may be used. Each restart makes one necessary.
    pub(super) fn admit(&self, index: usize, facts: &ServerFacts) -> Result<()> {
        let refuse = |kind, why: &str| Err(Error::new(kind, why));
        if facts.is_replica {
            return refuse(ErrorKind::Unsupported, "the server is a replica; a node must be independent of the others");
        }
        let is_whole;
        {
            let mut known = unpoisoned(&self.known);
            let same = |(other, known): (usize, &Option<Known>)| {
                other != index && known.as_ref().is_some_and(|known| known.facts.run_id == facts.run_id)
            };
            if !facts.run_id.is_empty() && known.iter().enumerate().any(same) {
                return refuse(ErrorKind::InvalidInput, "two of the nodes are the same server");
            }
            is_whole = self.is_whole(facts, known[index].as_ref());
            known[index] = Some(Known { facts: facts.clone(), is_whole });
        }
        if !self.is_durable(index) && self.strict.load(Ordering::Acquire) {
            return refuse(ErrorKind::Unsupported, "it does not keep its data any more, as fences rely on");
        }
        if is_whole {
            return Ok(());
        }
        if facts.run_id.is_empty() {
            return refuse(ErrorKind::Denied, "the user may not use INFO: without it the node would never vote");
        }
        let left = self.kept_out - facts.uptime;
        self.restart_policies[index].no_vote_before(self.clock.now() + left);
        let left = Duration::from_secs(left.as_secs() + 1);
        let why = format!("it started a short while ago and may have lost leases; it votes in {left:?}");
        Err(Error::new(ErrorKind::Unavailable, why))
    }

    fn facts(&self, index: usize) -> Option<ServerFacts> {
        unpoisoned(&self.known)[index].as_ref().map(|known| known.facts.clone())
    }

    pub(super) fn is_known(&self, index: usize) -> bool {
        self.facts(index).is_some()
    }

    pub(super) fn is_durable(&self, index: usize) -> bool {
        self.durable.or(self.facts(index).and_then(|facts| facts.durable)) == Some(true)
    }

    /// Whether a run of a node has all leases that the node granted before and that may still be believed in. It does if they must have lapsed
    /// by now. Else only this tells: it began with a log, and the run before it, which this client knows, had all leases and logged
    /// them. A new log in the place of a lost one has none of them; and a log of an unknown run may have been begun after they were granted.
    fn is_whole(&self, facts: &ServerFacts, former: Option<&Known>) -> bool {
        let logs = |facts: &ServerFacts| self.durable.or(facts.durable) == Some(true);
        let by_itself = facts.uptime >= self.kept_out || self.durable == Some(true);
        by_itself
            || former.is_some_and(|former| {
                let is_same_run = former.facts.run_id == facts.run_id;
                former.is_whole && (is_same_run || facts.began_with_log && logs(facts) && logs(&former.facts))
            })
    }

    pub(super) fn restart_policy(&self, index: usize) -> RestartPolicy {
        self.restart_policies[index].clone()
    }

    /// Fences were said to be strict, or not: if they were, a node that is not durable any more is refused.
    pub(super) fn expect_strict(&self, strict: bool) {
        self.strict.store(strict, Ordering::Release);
    }

    /// What the facts about a server put at risk.
    pub(super) fn warnings(&self, index: usize) -> Vec<String> {
        let Some(facts) = self.facts(index) else { return Vec::new() };
        let mut warnings = Vec::new();
        if facts.replicas > 0 {
            let why = "do not fail over to them: they may lack leases";
            warnings.push(format!("{} replicas are attached; {why}", facts.replicas));
        }
        if facts.run_id.is_empty() {
            let why = "whether it restarted or is there twice is not known";
            warnings.push(format!("the user may not use INFO: {why}"));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(uptime: u64, run_id: &str) -> ServerFacts {
        let mut facts = ServerFacts::default();
        (facts.uptime, facts.run_id) = (Duration::from_secs(uptime), run_id.to_owned());
        facts
    }

    #[test]
    fn a_node_votes_when_old_leases_must_have_lapsed() {
        let config = RedlockConfig::new().max_ttl(Duration::from_secs(10));
        let roster = Roster::new(3, &config, None, true);
        assert!(roster.admit(0, &facts(60, "a")).is_ok());
        assert_eq!(roster.admit(1, &facts(60, "a")).expect_err("twice").kind(), ErrorKind::InvalidInput);
        assert_eq!(roster.admit(1, &facts(4, "b")).expect_err("young").kind(), ErrorKind::Unavailable);
        let left = roster.restart_policy(1).votes_from().since(roster.clock.now());
        assert!(left > Duration::from_secs(6) && left < Duration::from_millis(6_200), "{left:?}");
        assert!(Roster::new(3, &config, None, false).admit(1, &facts(4, "b")).is_ok());
        assert!(Roster::new(3, &config, Some(true), true).admit(1, &facts(4, "b")).is_ok());
        assert_eq!(roster.admit(1, &facts(0, "")).expect_err("never old enough").kind(), ErrorKind::Denied);
        assert!(Roster::new(3, &config, None, false).admit(1, &facts(0, "")).is_ok());
        let for_ever = RedlockConfig::new().max_ttl(Duration::MAX);
        assert!(Roster::new(3, &for_ever, None, true).admit(1, &facts(4, "b")).is_err());
    }

    #[test]
    fn a_durable_node_votes_at_once_where_its_former_run_is_known_to_have_had_all_leases() {
        let config = RedlockConfig::new().max_ttl(Duration::from_secs(10));
        let run = |run_id: &str, durable, began_with_log| {
            let mut facts = facts(4, run_id);
            (facts.durable, facts.began_with_log) = (Some(durable), began_with_log);
            facts
        };
        let old = |durable| {
            let mut facts = facts(60, "old");
            facts.durable = Some(durable);
            facts
        };
        let votes = |runs: &[ServerFacts]| {
            let roster = Roster::new(3, &config, None, true);
            runs.iter().map(|facts| roster.admit(0, facts).is_ok()).collect::<Vec<_>>()
        };
        assert_eq!(votes(&[old(true), run("a", true, true)]), [true, true]);
        assert_eq!(votes(&[old(true), run("a", true, true), run("a", true, false)]), [true; 3], "a rewrite of the log");
        assert_eq!(votes(&[old(true), run("a", true, true), run("b", true, true)]), [true; 3]);
        assert_eq!(votes(&[run("a", true, true)]), [false], "nobody knows what its former run had lost");
        assert_eq!(votes(&[old(true), run("a", true, false)]), [true, false], "its directory may be a new one");
        let again = [old(true), run("a", true, false), run("b", true, true), run("b", true, true)];
        assert_eq!(votes(&again), [true, false, false, false], "the log of a run that had not all leases");
        assert_eq!(
            votes(&[old(false), run("a", true, true), run("a", true, true)]),
            [true, false, false],
            "an older log"
        );
        assert_eq!(votes(&[old(true), run("a", false, true)]), [true, false]);
    }
}
