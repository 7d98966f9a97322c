//! The safeguards of the stores.

use crate::list::Safeguard;

const REDLOCK_QUORUM: &str = "lockkit-redlock/src/wire/votes.rs";
const REDLOCK_ATTEMPT: &str = "lockkit-redlock/src/store/attempt.rs";
const REDLOCK_WAIT: &str = "lockkit-redlock/src/store/wait.rs";
const REDLOCK_LATE: &str = "lockkit-redlock/src/store/late.rs";
const REDLOCK_RENEW: &str = "lockkit-redlock/src/store/renew.rs";
const REDLOCK_CLAIMS: &str = "lockkit-redlock/src/client/claims.rs";
const REDLOCK_ROSTER: &str = "src/redlock/roster.rs";
const REDLOCK_NODE: &str = "lockkit-redlock/src/client/node.rs";
const REDLOCK_FENCE: &str = "lockkit-redlock/src/wire/fence.rs";
const MYSQL_FENCED: &str = "lockkit-mysql/src/fenced.rs";
const REDIS_SCRIPTS: &str = "lockkit-redis/src/wire/scripts.rs";
const REDIS_ACQUIRE: &str = "lockkit-redis/src/store/acquire.rs";
const REDIS_SERVER: &str = "lockkit-redis/src/wire/server.rs";
const REDIS_SENTINEL: &str = "lockkit-redis/src/client/sentinel.rs";
const REDIS_VOTE: &str = "lockkit-redis/src/client/vote.rs";
const REDIS_REPLICAS: &str = "lockkit-redis/src/client/replicas.rs";
const REDIS_CONNECTION: &str = "lockkit-redis/src/client/connection.rs";
const MYSQL_CONNECTION: &str = "lockkit-mysql/src/client/connection.rs";
const LOCKER: &str = "lockkit-core/src/locker.rs";
const ZK_PROOF: &str = "lockkit-zk/src/client/proof.rs";
const ZK_HEARTBEAT: &str = "lockkit-zk/src/client/session/heartbeat.rs";
const ZK_ZNODES: &str = "lockkit-zk/src/client/znodes.rs";
const ZK_ACQUIRE: &str = "lockkit-zk/src/store/acquire.rs";
const ZK_RELEASE: &str = "lockkit-zk/src/store/release.rs";
const ZK_RENEW: &str = "lockkit-zk/src/store/renew.rs";
const ZK_WAIT: &str = "lockkit-zk/src/store/wait.rs";
const ZK_DIRECTORY: &str = "lockkit-zk/src/store/directory.rs";
const REDLOCK_INFO: &str = "lockkit-redlock/src/client/quorum.rs";
const REDIS_RECORDS: &str = "lockkit-redis/src/store/records.rs";
const MYSQL_ORDER: &str = "lockkit-mysql/src/wire/order.rs";
const MYSQL_RECORDS: &str = "lockkit-mysql/src/store/records.rs";
const MYSQL_RAW: &str = "lockkit-mysql/src/client/raw.rs";
const ZK_RECORDS: &str = "lockkit-zk/src/store/records.rs";

pub(crate) const ALL: &[Safeguard] = &[
    // Redlock: votes, deadlines, restarts.
    Safeguard {
        name: "majority",
        does: "Any two majorities share a node",
        file: REDLOCK_QUORUM,
        code: "«nodes / 2 + 1»",
        without: "nodes / 2",
        noticed_by: "lockkit-redlock/lib::wire::votes::tests::two_majorities_always_share_a_node",
    },
    Safeguard {
        name: "no_vote",
        does: "A node that gave no answer has not granted",
        file: REDLOCK_ATTEMPT,
        code: "«ballot.votes.failed += 1»;\n                ballot.errors.push(member",
        without: "ballot.votes.granted += 1",
        noticed_by: "lockkit-redlock/redlock::restart::new_nodes_do_not_vote_and_say_why",
    },
    Safeguard {
        name: "no_renewal",
        does: "A node that gave no answer has not renewed",
        file: REDLOCK_RENEW,
        code: "«self.answers.failed()»;",
        without: "self.answers.yes += 1",
        noticed_by: "lockkit-redlock/redlock::down::a_renewal_by_a_minority_is_an_error",
    },
    Safeguard {
        name: "validity_redlock",
        does: "A grant lasts from the moment of its request",
        file: REDLOCK_ATTEMPT,
        code: "fence, span, until: «ballot.until», depth: 1 }",
        without: "quorum.info.clock.now() + request.ttl",
        noticed_by: "lockkit-redlock/redlock::deadline::a_lease_is_counted_from_the_moment_of_its_request",
    },
    Safeguard {
        name: "renewed_in_time",
        does: "A renewal by a majority is none after the deadline",
        file: REDLOCK_RENEW,
        code: "if «now >= grant.until» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::deadline::a_renewal_after_the_deadline_is_none",
    },
    Safeguard {
        name: "probation",
        does: "A node that got back a lease which it had lost counts only after a renewal without it",
        file: REDLOCK_RENEW,
        code: "let counts = match &self.known {\n                    Some((_, grant)) => «grant.nodes[node].counts == Some(hold.fence)»",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::deadline::a_healed_node_does_not_count_at_once",
    },
    Safeguard {
        name: "healed_in_time",
        does: "After the deadline no node is given back a lease that it lost",
        file: REDLOCK_RENEW,
        code: "if «quorum.info.clock.now() + quorum.config.timeout_for(renewal.ttl) >= grant.until» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::deadline::after_the_deadline_no_node_is_healed",
    },
    Safeguard {
        name: "undone_first",
        does: "A node is not asked again before it released what it granted before",
        file: REDLOCK_ATTEMPT,
        code: "if «self.entry.is_burnt_at(node)» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::late_replies::after_a_wait_no_node_is_asked_whose_release_is_under_way",
    },
    Safeguard {
        name: "burnt_not_healed",
        does: "Nor is it healed with a lease that was granted without it",
        file: REDLOCK_RENEW,
        code: "if «entry.is_burnt_at(node)» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::second_round::a_node_is_not_healed_as_long_as_a_release_is_repeated_there",
    },
    Safeguard {
        name: "burnt_not_counted",
        does: "What it has of that lease from before does not count",
        file: REDLOCK_CLAIMS,
        code: "if «self.is_burnt_at(node)» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::second_round::a_node_whose_release_is_under_way_does_not_count",
    },
    Safeguard {
        name: "burnt_in_doubt",
        does: "So it stays where a release was sent and got no answer, though another was answered",
        file: REDLOCK_CLAIMS,
        code: "if «!self.in_doubt» {",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::second_round::a_node_is_not_healed_where_a_release_got_no_answer",
    },
    Safeguard {
        name: "own_way",
        does: "A client whose last round is still being undone takes nothing for a failure of the nodes",
        file: REDLOCK_WAIT,
        code: "if «attempt.gives_way()» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::late_replies::after_a_wait_nodes_that_are_still_releasing_are_no_failure",
    },
    Safeguard {
        name: "token_over",
        does: "A token whose attempt ended is not asked for again",
        file: REDLOCK_CLAIMS,
        code: "Some(_) => «Begun::Burnt»",
        without: "Begun::Attempt(remembered.add(request, now))",
        noticed_by: "lockkit-redlock/redlock::late_replies::a_claim_whose_release_is_under_way_is_not_asked_for_again",
    },
    Safeguard {
        name: "late_grant_redlock",
        does: "What a node grants after the attempt ended is released",
        file: REDLOCK_LATE,
        code: "Ok(Attempt::Granted(hold)) if «!entry.is_over()» =>",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::dropped::an_acquisition_without_a_connection_leaves_nothing",
    },
    Safeguard {
        name: "delayed_restart",
        does: "A node that restarted without its data keeps out of votes for the longest ttl",
        file: REDLOCK_ROSTER,
        code: "if «facts.uptime >= self.kept_out» {",
        without: "true",
        noticed_by: "lockkit/lib::redlock::roster::tests::a_node_votes_when_old_leases_must_have_lapsed",
    },
    Safeguard {
        name: "delayed_restart_drift",
        does: "It keeps out longer than that, by the drift of clocks",
        file: REDLOCK_ROSTER,
        code: "let kept_out = «config.max_ttl + drift(config.max_ttl)»;",
        without: "config.max_ttl",
        noticed_by: "lockkit/lib::redlock::roster::tests::a_node_votes_when_old_leases_must_have_lapsed",
    },
    Safeguard {
        name: "restart_policy",
        does: "A node that may not vote yet is not asked",
        file: REDLOCK_NODE,
        code: "if «now < votes_from» {",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::restart::a_restart_policy_takes_the_vote_of_any_store",
    },
    // Redlock: fences.
    Safeguard {
        name: "raise",
        does: "Nodes that granted different fences raise their counters to the highest",
        file: REDLOCK_ATTEMPT,
        code: "Choice::Raise(fence) => «self.raise(&mut ballot, request, fence).await?»",
        without: "Ok(fence)",
        noticed_by: "lockkit-redlock/redlock::fencing::counters_that_are_apart_cost_one_more_round",
    },
    Safeguard {
        name: "highest_fence",
        does: "The fence is the highest that a node granted",
        file: REDLOCK_FENCE,
        code: "«granted.clone().max().unwrap_or_default()»",
        without: "granted.clone().min().unwrap_or_default()",
        noticed_by: "lockkit-redlock/lib::wire::fence::tests::equal_numbers_of_a_majority_are_the_fence",
    },
    Safeguard {
        name: "same_fence",
        does: "Only nodes that granted the very same fence agree",
        file: REDLOCK_FENCE,
        code: ".filter(|other| «other == fence»)",
        without: "other >= fence",
        noticed_by: "lockkit-redlock/lib::wire::fence::tests::equal_numbers_of_a_majority_are_the_fence",
    },
    Safeguard {
        name: "very_grant",
        does: "Only a node that still has the very grant counts for the raise",
        file: REDLOCK_ATTEMPT,
        code: "if «ballot.grants.contains(&(node, hold.fence))» =>",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::fencing::a_node_that_granted_anew_does_not_count_for_the_raise",
    },
    // Redis.
    Safeguard {
        name: "fence_clock",
        does: "A new fence counter starts at the server's clock",
        file: REDIS_SCRIPTS,
        code: r#"Script::new(«include_str!("scripts/batch.lua")»));"#,
        without: r#"&*include_str!("scripts/batch.lua").replace("max(fence, now, least)", "max(fence, least)").leak()"#,
        noticed_by: "lockkit-redis/redis::fences::no_fence_comes_twice_after_the_data_was_deleted",
    },
    Safeguard {
        name: "silent",
        does: "A waiter asks soon when the holder tells nobody of its release",
        file: REDIS_ACQUIRE,
        code: "lapses.min(if «is_silent» { SILENT_POLL }",
        without: "false",
        noticed_by: "lockkit-redis/redis::waiting::a_holder_that_tells_nobody_is_not_waited_for_long",
    },
    Safeguard {
        name: "permits_room",
        does: "No more hold a semaphore than it has permits",
        file: REDIS_SCRIPTS,
        code: "«Self::plain(numbered.into())»",
        without: r#"Self::plain(numbered.replace("call('ZCARD', members) < tonumber(string.sub(mode, 2))", "true").into())"#,
        noticed_by: "lockkit-redis/redis::kinds::all_kinds_of_holders_exclude_each_other",
    },
    Safeguard {
        name: "former_readers",
        does: "What is left of readers whose lock ended comes to no new life",
        file: REDIS_SCRIPTS,
        code: "«Self::plain(numbered.into())»",
        without: r#"Self::plain(numbered.replace("call('DEL', members, leases)", "call('TIME')").into())"#,
        noticed_by: "lockkit-redis/redis::kinds::members_of_a_group_that_ended_are_lost",
    },
    Safeguard {
        name: "group_floor",
        does: "A reader that joins others is above all that was given out before it connected",
        file: REDIS_SCRIPTS,
        code: "«Self::plain(numbered.into())»",
        without: r#"Self::plain(numbered.replace("if not fence or tonumber(fence) < least then", "if not fence then").into())"#,
        noticed_by: "lockkit-redis/redis::kinds::readers_of_a_group_that_came_back_are_above_writers_since",
    },
    Safeguard {
        name: "passed_by",
        does: "A waiter whose connection is gone holds nobody up",
        file: REDIS_SCRIPTS,
        code: "«Self::plain(numbered.into())»",
        without: r#"Self::plain(numbered.replace("return answer.err or answer[2] > 0", "return answer.err or true").into())"#,
        noticed_by: "lockkit-redis/redis::kinds::a_waiter_that_is_gone_is_passed_by",
    },
    Safeguard {
        name: "queue_first",
        does: "A try passes nobody that waits in the queue",
        file: REDIS_SCRIPTS,
        code: "«Self::plain(numbered.into())»",
        without: r#"Self::plain(numbered.replace("if may_grant and call('EXISTS', queue) == 0 and", "if may_grant and").into())"#,
        noticed_by: "lockkit/compliance::redis::fairness::a_try_passes_no_waiting_writer",
    },
    Safeguard {
        name: "pause",
        does: "A server that took over grants nothing for the longest ttl",
        file: REDIS_ACQUIRE,
        code: "epoch.and_then(|epoch| «epoch.pause(self.clock.now())»)",
        without: "None",
        noticed_by: "lockkit-redis/redis::failover::a_lease_that_was_not_replicated_is_waited_for",
    },
    Safeguard {
        name: "started",
        does: "So does a server that has just started, which may have had a predecessor",
        file: REDIS_SCRIPTS,
        code: r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"#,
        without: r#"include_str!("scripts/epoch.lua").replace("since = now - math", "since = now - 3600000 - math").into()"#,
        noticed_by: "lockkit-redis/redis::sentinel::a_server_that_just_started_is_waited_for",
    },
    Safeguard {
        name: "epoch_mark",
        does: "Only the server that granted a lease renews it",
        file: REDIS_SCRIPTS,
        code: "«concat!(\n        include_str!(\"scripts/guard.lua\"),\n        include_str!(\"scripts/mark.lua\"),\n        include_str!(\"scripts/renew.lua\")\n    )»",
        without: r#"&*concat!(include_str!("scripts/guard.lua"), include_str!("scripts/mark.lua"), include_str!("scripts/renew.lua")).replace(" mark and ", " false and ").leak()"#,
        noticed_by: "lockkit-redis/redis::failover::sentinel_a_replicated_lease_is_not_renewed",
    },
    Safeguard {
        name: "guard",
        does: "A script changes nothing on a server that was replaced since the connection was made",
        file: REDIS_SCRIPTS,
        code: "«Self::plain(numbered.into())»",
        without: r#"{
            let other = " or not string.find(replication, 'master_replid:' .. id, 1, true)";
            Self::plain(numbered.replace(other, "").into())
        }"#,
        noticed_by: "lockkit-redis/redis::failover::a_change_that_nobody_saw_is_noticed",
    },
    Safeguard {
        name: "full_shared",
        does: "A full server renews readers and permits",
        file: REDIS_SCRIPTS,
        code: "«Self::plain(numbered.into())»",
        without: r#"Self::plain(numbered.replace("call('HDEL', places, me)\n  call('HSET'", "call('HSET'").into())"#,
        noticed_by: "lockkit-redis/redis::full::sentinels",
    },
    Safeguard {
        name: "full_replicas",
        does: "A full server has its replicas acknowledge a renewal",
        file: REDIS_REPLICAS,
        code: "if «connection.accept(extended, Sent::ReadOnly)? != Value::Int(1)»",
        without: "true",
        noticed_by: "lockkit-redis/redis::full::one_server",
    },
    Safeguard {
        name: "promoted",
        does: "A primary that is being replaced is not taken for the one that its successor's epoch belongs to",
        file: REDIS_SENTINEL,
        code: "let (host, port): (String, u16) = «redis::from_redis_value(address.clone()).map_err(|_| odd())?»;",
        without: r#"(fields["ip"].clone(), fields["port"].parse().map_err(|_| odd())?)"#,
        noticed_by: "lockkit-redis/redis::sentinel::a_server_that_is_being_replaced_is_not_believed_in",
    },
    Safeguard {
        name: "same_epoch",
        does: "Of two primaries at the same epoch the one counts that a majority of the sentinels names",
        file: REDIS_VOTE,
        code: "«*like >= majority || *like == newest().count()»",
        without: "true",
        noticed_by: "lockkit-redis/redis::sentinel::which_sentinel_answers_last_decides_nothing",
    },
    Safeguard {
        name: "floor_of_successor",
        does: "A server that took over grants fences above its predecessor's clock",
        file: REDIS_CONNECTION,
        code: "(Some(epoch), _) => «Ok(epoch.floor)»",
        without: "Ok(Fence::NONE)",
        noticed_by: "lockkit-redis/redis::failover::a_lease_that_was_not_replicated_is_waited_for",
    },
    Safeguard {
        name: "floor_of_connection",
        does: "After a reconnection fences are above the server's clock",
        file: REDIS_CONNECTION,
        code: "(None, FenceClock::Store) => «self.clock.clone()»",
        without: "Ok(Fence::NONE)",
        noticed_by: "lockkit-redis/redis::fences::no_fence_comes_twice_after_a_restart_from_a_snapshot",
    },
    Safeguard {
        name: "uptime",
        does: "A server that says that it is up for one second may have just started",
        file: REDIS_SERVER,
        code: r#"«field(info, "uptime_in_seconds").parse::<u64>().unwrap_or(0).saturating_sub(1)»;"#,
        without: r#"field(info, "uptime_in_seconds").parse::<u64>().unwrap_or(0)"#,
        noticed_by: "lockkit-redis/lib::wire::server::tests::facts_are_read_and_not_guessed",
    },
    // MySQL and MariaDB.
    Safeguard {
        name: "in_doubt",
        does: "A connection with an open question does not go back to the pool",
        file: MYSQL_CONNECTION,
        code: "if «!raw.is_in_doubt()» {",
        without: "true",
        noticed_by: "lockkit-mysql/mysql::mariadb::every_question_can_be_dropped_at_any_moment",
    },
    Safeguard {
        name: "reset",
        does: "A statement whose connection was reset may still be waiting at the server",
        file: MYSQL_CONNECTION,
        code: "if «!is_done» {",
        without: "false",
        noticed_by: "lockkit-mysql/mysql::mariadb::a_statement_whose_connection_was_reset_takes_no_lock_for_nobody",
    },
    Safeguard {
        name: "no_chain",
        does: "No transaction follows another by itself, whatever the server is set to",
        file: MYSQL_CONNECTION,
        code: "let text = sqlx::AssertSqlSafe(«text(question)»);",
        without: r#"text(question).replace("COMMIT AND NO CHAIN NO RELEASE", "COMMIT")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::transactions_that_are_to_follow_each_other_hide_nothing",
    },
    Safeguard {
        name: "repeated_ask",
        does: "A claim that asks again for what it has shortens no lease",
        file: MYSQL_ORDER,
        code: "«sql»\n    }\n\n    /// Prolongs the place of a claim in the queue.",
        without: r#"sql.replace("SET expires = GREATEST(expires, ", "SET expires = COALESCE(NULL, ")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::a_repeated_request_shortens_no_lease",
    },
    Safeguard {
        name: "short_turn",
        does: "A turn lasts until the one whose it is can have heard of it",
        file: MYSQL_CONNECTION,
        code: "let text = sqlx::AssertSqlSafe(«text(question)»);",
        without: r#"text(question).replace("GREATEST(ttl, 1000000)", "ttl")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::a_short_ttl_leaves_time_for_the_turn",
    },
    // ZooKeeper.
    Safeguard {
        name: "proof_sent",
        does: "A session lives from the moment at which a request was sent",
        file: ZK_PROOF,
        code: "self.trips.push_back(«Trip { sent, answered }»)",
        without: "Trip { sent: answered, answered }",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it",
    },
    Safeguard {
        name: "proof_answered",
        does: "A request proves something when it is answered",
        file: ZK_PROOF,
        code: ".find(move |trip| «trip.answered <= moment»)",
        without: "trip.sent <= moment",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it",
    },
    Safeguard {
        name: "proof_spacing",
        does: "Between the first and the second request of a proof is half a tick",
        file: ZK_PROOF,
        code: "find(|trip| «trip.answered + spacing <= second.sent»)",
        without: "trip.answered <= second.sent",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it",
    },
    Safeguard {
        name: "proof_drift",
        does: "A session is believed in for less than its timeout: the leader's clock may be faster",
        file: ZK_PROOF,
        code: "«sent + (self.timeout - self.timeout / 100)»",
        without: "sent + self.timeout",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_new_session_lasts_from_its_first_request",
    },
    Safeguard {
        name: "proof_moved",
        does: "A session that moved to another server proves nothing until its timeout is known",
        file: ZK_PROOF,
        code: "if «self.unsettled().is_some()» {\n            return;\n        }\n        self.written",
        without: "false",
        noticed_by: "lockkit-zk/lib::client::proof::tests::until_the_timeout_is_known_a_write_proves_nothing",
    },
    Safeguard {
        name: "proof_own_node",
        does: "A write proves something only if the session is the one that has the node",
        file: ZK_HEARTBEAT,
        code: "Ok(_) if «own?.is_empty()» =>",
        without: "{ drop(own); false }",
        noticed_by: "lockkit-zk/zk::reconnect::a_reconnection_in_a_new_session_ends_the_leases_of_the_old_one",
    },
    Safeguard {
        name: "silence",
        does: "A session that sends, but understands no answer, is given up after its timeout",
        file: ZK_HEARTBEAT,
        code: "if !settled && «self.client.state() == zk::SessionState::SyncConnected» &&",
        without: "false",
        noticed_by: "lockkit-zk/zk::faults::a_session_whose_answers_can_not_be_read_is_replaced",
    },
    Safeguard {
        name: "zk_words",
        does: "A word about a broken lease leaves those before it",
        file: ZK_ZNODES,
        code: "value::revoked(«&before», token)",
        without: "&[]",
        noticed_by: "lockkit-zk/zk::broken::a_holder_is_told_though_the_next_one_was_broken_too",
    },
    Safeguard {
        name: "zk_words_at_once",
        does: "So it does when several are broken at once",
        file: ZK_ZNODES,
        code: ".as_bytes(), «Some(stat.version)»)?",
        without: "None",
        noticed_by: "lockkit-zk/zk::broken::all_that_are_broken_at_once_are_told",
    },
    Safeguard {
        name: "zk_repeated_release",
        does: "A release that is repeated does not call a lease released that was broken",
        file: ZK_RELEASE,
        code: "if «!session.is_revoked(lock, &claim.token, bound).await?» =>",
        without: "true",
        noticed_by: "lockkit-zk/zk::broken::a_repeated_release_does_not_hide_that_the_lease_was_revoked",
    },
    Safeguard {
        name: "zk_break_without_answer",
        does: "A holder looks at once when its lease may have been broken by way of its own store",
        file: LOCKER,
        code: "alarm: «self.info().alarm.as_ref()», token }",
        without: "None",
        noticed_by: "lockkit-zk/zk::broken::a_break_by_way_of_its_own_store_is_heard_though_its_reply_is_lost",
    },
    Safeguard {
        name: "zk_break_again",
        does: "It does so, too, when its node goes after a break by way of its own store that came to nothing",
        file: ZK_RENEW,
        code: "if «deleted» {\n        session.alarm",
        without: "deleted && session.claimed(&token).is_some_and(|claimed| !claimed.releasing)",
        noticed_by: "lockkit-zk/zk::broken::a_break_is_heard_after_one_that_came_to_nothing",
    },
    Safeguard {
        name: "zk_released_meanwhile",
        does: "What is being released is not granted",
        file: ZK_ACQUIRE,
        code: "is_ours = «!claimed.releasing»;",
        without: "true",
        noticed_by: "lockkit-zk/zk::dropped::what_is_about_to_be_released_is_not_granted",
    },
    Safeguard {
        name: "zk_wait",
        does: "A wait ends with the caller's time, whatever it is about to ask",
        file: ZK_WAIT,
        code: "passed(«deadline») =>",
        without: "None",
        noticed_by: "lockkit-zk/zk::waiting::a_wait_ends_in_time_however_many_leave_meanwhile",
    },
    Safeguard {
        name: "zk_new_directory",
        does: "A client that makes a lock's directory anew has seen what was written last",
        file: ZK_DIRECTORY,
        code: "add_delete(&self.lock, «Some(kept.version)»)?",
        without: "None",
        noticed_by: "lockkit-zk/lib::store::directory::tests::that_the_last_holder_was_revoked_is_known_in_the_new_directory",
    },
    // Records, and leases that outlive their clients.
    Safeguard {
        name: "resume_redlock",
        does: "Where one node ends leases with the session, no lease outlives its client",
        file: REDLOCK_INFO,
        code: "resume: «nodes.iter().all(|node| node.store().info().capability.resume)»",
        without: "true",
        noticed_by: "lockkit-redlock/redlock::misuse::where_one_node_has_sessions_no_lease_outlives_its_client",
    },
    Safeguard {
        name: "resume_in_parts",
        does: "That a lease is gone is said only if too many nodes lack it",
        file: REDLOCK_ATTEMPT,
        code: "«quorum.nodes.len() - ballot.votes.held >= quorum.majority» =>",
        without: "false",
        noticed_by: "lockkit-redlock/redlock::fencing::a_slow_node_may_have_the_lease_that_is_taken_up",
    },
    Safeguard {
        name: "record_replicas",
        does: "A record is neither read nor written as long as too few replicas have it",
        file: REDIS_RECORDS,
        code: "let Err(shortfall) = «replicas.confirm(&connection).await»",
        without: "Ok(())",
        noticed_by: "lockkit-redis/redis::replicas::a_record_that_the_replica_lacks_is_neither_read_nor_written",
    },
    Safeguard {
        name: "record_fresh",
        does: "A record is what the leader has, not what a server remembers",
        file: ZK_RECORDS,
        code: "if «node.is_still(&found).await?» {\n                    return Ok(found",
        without: "true",
        noticed_by: "lockkit-zk/zk::ensemble::a_record_is_never_read_as_it_was",
    },
    Safeguard {
        name: "record_anew",
        does: "A record that was made anew is not taken for the former one",
        file: ZK_RECORDS,
        code: "«all.add_check_version(&self.child(&found.child), 0)»",
        without: "Ok(())",
        noticed_by: "lockkit-zk/zk::ensemble::a_record_that_was_made_anew_is_another",
    },
    Safeguard {
        name: "record_answer",
        does: "A record was changed only if the answer is the one to that question",
        file: MYSQL_RECORDS,
        code: "match (done.rows_affected(), «value::is_answer(&done, question)») {",
        without: "done.rows_affected() < 2",
        noticed_by: "lockkit-mysql/compliance::mysql::records::an_answer_that_comes_twice_shifts_no_others",
    },
    Safeguard {
        name: "row_number",
        does: "No question has a number that a row can have",
        file: MYSQL_RAW,
        code: "asked: «FIRST_QUESTION»,",
        without: "0",
        noticed_by: "lockkit-mysql/mysql::mariadb::the_number_of_a_new_row_is_not_taken_for_that_of_a_question",
    },
    // Resources with readers.
    Safeguard {
        name: "last_writer_redis",
        does: "A resource in Redis remembers the last writer beside a reader",
        file: REDIS_SCRIPTS,
        code: "Script::new(«FENCED_SHARED_CODE»)",
        without: r#"&*FENCED_SHARED_CODE.replace("fence .. ' ' .. writer", "fence").leak()"#,
        noticed_by: "lockkit-redis/redis::fenced::the_scripts_keep_the_rule_of_the_core",
    },
    Safeguard {
        name: "last_writer_mysql",
        does: "A resource in MySQL remembers the last writer beside readers",
        file: MYSQL_FENCED,
        code: r#"("0", «format!("IF(fence < {fence}, COALESCE(writer, fence), writer)")»)"#,
        without: r#"format!("IF(fence < {fence}, fence, writer)")"#,
        noticed_by: "lockkit-mysql/mysql::mariadb::readers_and_writers_that_come_at_once_are_admitted_in_some_order",
    },
];
