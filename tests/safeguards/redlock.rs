//! The safeguards of Redlock.

use crate::list::safeguards;

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
const INFO: &str = "lockkit-redlock/src/store/mod.rs";

safeguards! {
    // Redlock: votes, deadlines, restarts.
    majority in QUORUM
        "Any two majorities share a node"
        "«nodes / 2 + 1»" => "nodes / 2"
        by "lockkit-redlock/lib::wire::votes::tests::two_majorities_always_share_a_node";
    no_vote in ATTEMPT
        "A node that gave no answer has not granted"
        "«ballot.votes.failed += 1»;\n                ballot.errors.push(member" => "ballot.votes.granted += 1"
        by "lockkit-redlock/redlock::restart::new_nodes_do_not_vote_and_say_why";
    burnt_at_a_node in RENEW
        "A node that has burnt a token is not asked for the lost lease by it"
        "entry.grant().filter(|_| «!entry.burnt.contains(node)»)" => "true"
        by "lockkit-redlock/redlock::burnt::a_node_that_burnt_the_token_is_not_healed";
    burnt_at_the_rendezvous in ATTEMPT
        "The node where a claim waited is not asked again if it has burnt the token"
        "if «self.entry.burnt.contains(node)» {" => "false"
        by "lockkit-redlock/redlock::burnt::a_node_that_burnt_the_token_while_it_was_waited_for_is_not_asked_again";
    no_renewal in RENEW
        "A node that gave no answer has not renewed"
        "«self.answers.failed()»;" => "self.answers.yes += 1"
        by "lockkit-redlock/redlock::down::a_renewal_by_a_minority_is_an_error";
    validity_redlock in ATTEMPT
        "A grant lasts from the moment of its request"
        "fence, span, until: «ballot.until», depth: 1 }" => "quorum.config.clock.now() + request.ttl"
        by "lockkit-redlock/redlock::deadline::a_lease_is_counted_from_the_moment_of_its_request";
    renewed_in_time in "lockkit-redlock/src/client/claims.rs"
        "A renewal by a majority is none after the deadline"
        ".filter(|grant| «now < grant.until» && !self.is_over())" => "{ let _ = (now, &grant); true }"
        by "lockkit-redlock/redlock::deadline::a_renewal_after_the_deadline_is_none";
    over in RENEW
        "A claim that is over here is not renewed by the word of its nodes"
        "(Decision::Done, _) if «self.is_over» =>" => "{ let _ = self.is_over; false }"
        by "lockkit-redlock/redlock::release::a_claim_that_is_over_is_not_renewed_by_the_word_of_its_nodes";
    probation in RENEW
        "A node that got back a lease which it had lost counts only after a renewal without it"
        "let counts = |grant: &Grant| «grant.nodes[node].counts == Some(hold.fence)»;" => "grant.depth < u32::MAX"
        by "lockkit-redlock/redlock::deadline::a_healed_node_does_not_count_at_once";
    healed_in_time in RENEW
        "After the deadline no node is given back a lease that it lost"
        "if «quorum.config.clock.now() + quorum.config.timeout_for(renewal.ttl) >= grant.until» {" => "false"
        by "lockkit-redlock/redlock::deadline::after_the_deadline_no_node_is_healed";
    token_over in CLAIMS
        "A token whose attempt ended is not asked for again"
        "Some(_) => «Begun::Burnt»" => "Begun::Attempt(remembered.add(request, now))"
        by "lockkit-redlock/redlock::late_replies::a_claim_whose_release_is_under_way_is_not_asked_for_again";
    late_grant_redlock in LATE
        "A grant of a node after the attempt ended is released"
        "Ok(Attempt::Granted(hold)) if «!entry.is_over()» =>" => "true"
        by "lockkit-redlock/redlock::dropped::an_acquisition_without_a_connection_leaves_nothing";
    delayed_restart in ROSTER
        "A node that restarted without its data keeps out of votes for the longest ttl"
        "let by_itself = «facts.uptime >= self.kept_out || self.durable == Some(true)»;" => "true"
        by "lockkit/lib::redlock::roster::tests::a_node_votes_when_old_leases_must_have_lapsed";
    delayed_restart_drift in ROSTER
        "It keeps out longer than that, by the drift of clocks"
        "let kept_out = «config.max_ttl.saturating_add(drift(config.max_ttl))»;" => "config.max_ttl"
        by "lockkit/lib::redlock::roster::tests::a_node_votes_when_old_leases_must_have_lapsed";
    former_log in ROSTER
        "A node keeps the leases of its former run only if it began with a log"
        "is_same_run || «facts.began_with_log» &&" => "true"
        by "lockkit/lib::redlock::roster::tests::a_durable_node_votes_at_once_where_its_former_run_is_known_to_have_had_all_leases";
    unknown_former_run in ROSTER
        "and if that run is known to have had them"
        "|| former.«is_some_and»(|former| {" => "is_none_or"
        by "lockkit/lib::redlock::roster::tests::a_durable_node_votes_at_once_where_its_former_run_is_known_to_have_had_all_leases";
    restart_policy in NODE
        "A node that may not vote yet is not asked"
        "if «now < votes_from» {" => "false"
        by "lockkit-redlock/redlock::restart::a_restart_policy_takes_the_vote_of_any_store";
    // Redlock: fences.
    raise in ATTEMPT
        "Nodes that granted different fences raise their counters to the highest"
        "Choice::Raise(fence) => «self.raise(&mut ballot, request, fence).await?»" => "Ok(fence)"
        by "lockkit-redlock/redlock::fencing::counters_that_are_apart_cost_one_more_round";
    highest_fence in FENCE
        "The fence is the highest that a node granted"
        "«granted.clone().max().unwrap_or_default()»" => "granted.clone().min().unwrap_or_default()"
        by "lockkit-redlock/lib::wire::fence::tests::equal_numbers_of_a_majority_are_the_fence";
    same_fence in FENCE
        "Only nodes that granted the very same fence agree"
        ".filter(|other| «other == fence»)" => "other >= fence"
        by "lockkit-redlock/lib::wire::fence::tests::equal_numbers_of_a_majority_are_the_fence";
    very_grant in ATTEMPT
        "Only a node that still has the very grant counts for the raise"
        "if «ballot.grants.contains(&(node, hold.fence))» =>" => "true"
        by "lockkit-redlock/redlock::fencing::a_node_that_granted_anew_does_not_count_for_the_raise";
    calls_over in CALLS
        "A call ends with the runtime that it was begun on"
        "if «self.has_ended()» {" => "false"
        by "lockkit-redlock/redlock::background::a_refused_try_leaves_nothing_though_its_runtime_ends";
    undo_over in LATE
        "The release of a claim that an ended call may have left at a node is repeated there"
        "if «!self.is_done» {" => "false"
        by "lockkit-redlock/redlock::background::a_refused_try_leaves_nothing_though_its_runtime_ends";
    // Records, and leases that outlive their clients.
    resume_redlock in "lockkit-redlock/src/store/check.rs"
        "Where one node ends leases with the session, no lease outlives its client"
        "let outlasts = «nodes.iter().all(|node| node.store().info().capability.resume == Resume::UntilTtl)»;" => "true"
        by "lockkit-redlock/redlock::misuse::where_one_node_has_sessions_no_lease_outlives_its_client";
    resume_in_parts in ATTEMPT
        "That a lease is gone is said only if too many nodes lack it"
        "«quorum.nodes.len() - ballot.votes.held >= quorum.majority» =>" => "false"
        by "lockkit-redlock/redlock::fencing::a_slow_node_may_have_the_lease_that_is_taken_up";
    inspection_waits in INSPECT
        "An inspection waits longer than the node timeout for a majority"
        "let longer = «RedlockConfig::PATIENCE.saturating_sub(limit)»;" => "Duration::ZERO"
        by "lockkit-redlock/redlock::down::an_inspection_waits_for_a_majority_that_is_slow";
    unheard_node in LATE
        "A release is not final at a node whose answer will not be heard"
        "«self.entry.in_doubt.add(self.node)»;" => "_ = self.node"
        by "lockkit-redlock/redlock::background::a_release_is_not_final_at_a_node_that_nobody_hears_out";
    reconnections_of_nodes in INFO
        "A connection that a node replaces is counted"
        "«Reconnections::of(nodes.iter().map(|node| node.store().info().reconnections.clone()))»" => "Reconnections::default()"
        by "lockkit-redlock/redlock::down::a_connection_that_a_node_replaces_is_counted";
    tried_at_a_standstill in BACKLOG
        "The next task repeats the releases of one whose runtime stands still"
        "«self.put_back(now)»;\n        let (until," => "drop(now)"
        by "lockkit-redlock/lib::client::backlog::tests::what_a_runtime_tries_that_stands_still_is_tried_by_the_next";
    owed_once_more in BACKLOG
        "A release that is being repeated learns of another request for its claim"
        "«self.settled && other.settled», self.lapse" => "{ let _ = other.settled; self.settled }"
        by "lockkit-redlock/lib::client::backlog::tests::a_release_that_is_known_learns_that_it_is_not_settled";
    refused_at_a_node in BACKLOG
        "Where nothing lapses at a node, a release that it refused is tried again"
        "!error.is_retryable() && «lapses(node)»" => "{ let _ = node; true }"
        by "lockkit-redlock/redlock::background::what_a_node_refuses_is_tried_again_where_nothing_lapses";
    back_again in BACKLOG
        "A node that comes back is told within seconds of what was released while it was away"
        "false => «LONGEST_PAUSE»," => "LONGEST_RETRY"
        by "lockkit-redlock/redlock::background::a_node_that_comes_back_is_told_within_seconds";
}
