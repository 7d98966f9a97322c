//! The safeguards of Redlock.

use crate::list::Safeguard;

const BACKLOG: &str = "lockkit-redlock/src/client/backlog.rs";
const QUORUM: &str = "lockkit-redlock/src/wire/votes.rs";
const ATTEMPT: &str = "lockkit-redlock/src/store/attempt.rs";
const RENEW: &str = "lockkit-redlock/src/store/renew.rs";
const CLAIMS: &str = "lockkit-redlock/src/client/claims.rs";
const LATE: &str = "lockkit-redlock/src/store/late.rs";
const ROSTER: &str = "src/redlock/roster.rs";
const NODE: &str = "lockkit-redlock/src/client/node.rs";
const FENCE: &str = "lockkit-redlock/src/wire/fence.rs";
const INSPECT: &str = "lockkit-redlock/src/store/inspect.rs";
const CALLS: &str = "lockkit-redlock/src/client/calls.rs";
const INFO: &str = "lockkit-redlock/src/client/quorum.rs";

pub(crate) const ALL: &[Safeguard] = &[
    // Redlock: votes, deadlines, restarts.
    Safeguard {
        name: "majority",
        does: "Any two majorities share a node",
        file: QUORUM,
        code: "«nodes / 2 + 1»",
        without: "nodes / 2",
        noticed_by: "lockkit-redlock/lib::wire::votes::tests::two_majorities_always_share_a_node",
    },
    Safeguard {
        name: "no_vote",
        does: "A node that gave no answer has not granted",
        file: ATTEMPT,
        code: "«ballot.votes.failed += 1»;\n                ballot.errors.push(member",
        without: "ballot.votes.granted += 1",
        noticed_by: "lockkit-redlock/redlock::restart::new_nodes_do_not_vote_and_say_why",
    },
    Safeguard {
        name: "burnt_at_a_node",
        does: "A node that has burnt a token is not asked for the lost lease by it",
        file: RENEW,
        code: "entry.grant().filter(|_| «!entry.burnt.contains(node)»)",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::burnt::a_node_that_burnt_the_token_is_not_healed",
    },
    Safeguard {
        name: "burnt_at_the_rendezvous",
        does: "The node where a claim waited is not asked again if it has burnt the token",
        file: ATTEMPT,
        code: "if «self.entry.burnt.contains(node)» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::burnt::a_node_that_burnt_the_token_while_it_was_waited_for_is_not_asked_again",
    },
    Safeguard {
        name: "no_renewal",
        does: "A node that gave no answer has not renewed",
        file: RENEW,
        code: "«self.answers.failed()»;",
        without: "self.answers.yes += 1",
        noticed_by: "lockkit-redlock/redlock::down::a_renewal_by_a_minority_is_an_error",
    },
    Safeguard {
        name: "validity_redlock",
        does: "A grant lasts from the moment of its request",
        file: ATTEMPT,
        code: "fence, span, until: «ballot.until», depth: 1 }",
        without: "quorum.info.clock.now() + request.ttl",
        noticed_by: "lockkit-redlock/redlock::deadline::a_lease_is_counted_from_the_moment_of_its_request",
    },
    Safeguard {
        name: "renewed_in_time",
        does: "A renewal by a majority is none after the deadline",
        file: "lockkit-redlock/src/client/claims.rs",
        code: ".filter(|grant| «now < grant.until» && !self.is_over())",
        without: "{ let _ = (now, &grant); true }",
        noticed_by: "lockkit-redlock/redlock::deadline::a_renewal_after_the_deadline_is_none",
    },
    Safeguard {
        name: "over",
        does: "A claim that is over here is not renewed by the word of its nodes",
        file: RENEW,
        code: "(Decision::Done, _) if «self.is_over» =>",
        without: "{ let _ = self.is_over; false }",
        noticed_by: "lockkit-redlock/redlock::release::a_claim_that_is_over_is_not_renewed_by_the_word_of_its_nodes",
    },
    Safeguard {
        name: "probation",
        does: "A node that got back a lease which it had lost counts only after a renewal without it",
        file: RENEW,
        code: "let counts = match &self.known {\n                    Some((_, grant)) => «grant.nodes[node].counts == Some(hold.fence)»",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::deadline::a_healed_node_does_not_count_at_once",
    },
    Safeguard {
        name: "healed_in_time",
        does: "After the deadline no node is given back a lease that it lost",
        file: RENEW,
        code: "if «quorum.info.clock.now() + quorum.config.timeout_for(renewal.ttl) >= grant.until» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::deadline::after_the_deadline_no_node_is_healed",
    },
    Safeguard {
        name: "token_over",
        does: "A token whose attempt ended is not asked for again",
        file: CLAIMS,
        code: "Some(_) => «Begun::Burnt»",
        without: "Begun::Attempt(remembered.add(request, now))",
        noticed_by: "lockkit-redlock/redlock::late_replies::a_claim_whose_release_is_under_way_is_not_asked_for_again",
    },
    Safeguard {
        name: "late_grant_redlock",
        does: "What a node grants after the attempt ended is released",
        file: LATE,
        code: "Ok(Attempt::Granted(hold)) if «!entry.is_over()» =>",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::dropped::an_acquisition_without_a_connection_leaves_nothing",
    },
    Safeguard {
        name: "delayed_restart",
        does: "A node that restarted without its data keeps out of votes for the longest ttl",
        file: ROSTER,
        code: "if «facts.uptime >= self.kept_out» {",
        without: "true",
        noticed_by: "lockkit/lib::redlock::roster::tests::a_node_votes_when_old_leases_must_have_lapsed",
    },
    Safeguard {
        name: "delayed_restart_drift",
        does: "It keeps out longer than that, by the drift of clocks",
        file: ROSTER,
        code: "let kept_out = «config.max_ttl + drift(config.max_ttl)»;",
        without: "config.max_ttl",
        noticed_by: "lockkit/lib::redlock::roster::tests::a_node_votes_when_old_leases_must_have_lapsed",
    },
    Safeguard {
        name: "restart_policy",
        does: "A node that may not vote yet is not asked",
        file: NODE,
        code: "if «now < votes_from» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::restart::a_restart_policy_takes_the_vote_of_any_store",
    },
    // Redlock: fences.
    Safeguard {
        name: "raise",
        does: "Nodes that granted different fences raise their counters to the highest",
        file: ATTEMPT,
        code: "Choice::Raise(fence) => «self.raise(&mut ballot, request, fence).await?»",
        without: "Ok(fence)",
        noticed_by: "lockkit-redlock/redlock::fencing::counters_that_are_apart_cost_one_more_round",
    },
    Safeguard {
        name: "highest_fence",
        does: "The fence is the highest that a node granted",
        file: FENCE,
        code: "«granted.clone().max().unwrap_or_default()»",
        without: "granted.clone().min().unwrap_or_default()",
        noticed_by: "lockkit-redlock/lib::wire::fence::tests::equal_numbers_of_a_majority_are_the_fence",
    },
    Safeguard {
        name: "same_fence",
        does: "Only nodes that granted the very same fence agree",
        file: FENCE,
        code: ".filter(|other| «other == fence»)",
        without: "other >= fence",
        noticed_by: "lockkit-redlock/lib::wire::fence::tests::equal_numbers_of_a_majority_are_the_fence",
    },
    Safeguard {
        name: "very_grant",
        does: "Only a node that still has the very grant counts for the raise",
        file: ATTEMPT,
        code: "if «ballot.grants.contains(&(node, hold.fence))» =>",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::fencing::a_node_that_granted_anew_does_not_count_for_the_raise",
    },
    Safeguard {
        name: "calls_over",
        does: "A call ends with the runtime that it was begun on",
        file: CALLS,
        code: "if «self.has_ended()» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::background::a_refused_try_leaves_nothing_though_its_runtime_ends",
    },
    Safeguard {
        name: "undo_over",
        does: "What a call that has ended may have left at a node is repeated there",
        file: LATE,
        code: "if «!self.is_done» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::background::a_refused_try_leaves_nothing_though_its_runtime_ends",
    },
    // Records, and leases that outlive their clients.
    Safeguard {
        name: "resume_redlock",
        does: "Where one node ends leases with the session, no lease outlives its client",
        file: INFO,
        code: "resume: «nodes.iter().all(|node| node.store().info().capability.resume)»",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::misuse::where_one_node_has_sessions_no_lease_outlives_its_client",
    },
    Safeguard {
        name: "resume_in_parts",
        does: "That a lease is gone is said only if too many nodes lack it",
        file: ATTEMPT,
        code: "«quorum.nodes.len() - ballot.votes.held >= quorum.majority» =>",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::fencing::a_slow_node_may_have_the_lease_that_is_taken_up",
    },
    Safeguard {
        name: "inspection_waits",
        does: "An inspection waits longer than the node timeout for a majority",
        file: INSPECT,
        code: "let longer = «RedlockConfig::PATIENCE.saturating_sub(limit)»;",
        without: "Duration::ZERO",
        noticed_by: "lockkit-redlock/redlock::down::an_inspection_waits_for_a_majority_that_is_slow",
    },
    Safeguard {
        name: "unheard_node",
        does: "A release is not final at a node whose answer will not be heard",
        file: LATE,
        code: "«self.entry.in_doubt.add(self.node)»;",
        without: "_ = self.node",
        noticed_by: "lockkit-redlock/redlock::background::a_release_is_not_final_at_a_node_that_nobody_hears_out",
    },
    Safeguard {
        name: "reconnections_of_nodes",
        does: "A connection that a node replaces is counted",
        file: INFO,
        code: "«Reconnections::of(nodes.iter().map(|node| node.store().info().reconnections.clone()))»",
        without: "Reconnections::default()",
        noticed_by: "lockkit-redlock/redlock::down::a_connection_that_a_node_replaces_is_counted",
    },
    Safeguard {
        name: "tried_at_a_standstill",
        does: "The next task repeats the releases of one whose runtime stands still",
        file: BACKLOG,
        code: "«self.put_back(now)»;\n        self.next_id += 1;",
        without: "drop(now)",
        noticed_by: "lockkit-redlock/lib::client::backlog::tests::what_a_runtime_tries_that_stands_still_is_tried_by_the_next",
    },
    Safeguard {
        name: "owed_once_more",
        does: "A release that is being repeated learns of another request for its claim",
        file: BACKLOG,
        code: "«self.settled && other.settled», self.lapse",
        without: "{ let _ = other.settled; self.settled }",
        noticed_by: "lockkit-redlock/lib::client::backlog::tests::a_release_that_is_known_learns_that_it_is_not_settled",
    },
];
