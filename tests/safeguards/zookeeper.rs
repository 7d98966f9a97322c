//! The safeguards of ZooKeeper.

use crate::list::Safeguard;

const PROOF: &str = "lockkit-zk/src/client/proof.rs";
const HEARTBEAT: &str = "lockkit-zk/src/client/session/heartbeat.rs";
const SESSION: &str = "lockkit-zk/src/client/session.rs";
const ZNODES: &str = "lockkit-zk/src/client/znodes.rs";
const ENTER: &str = "lockkit-zk/src/store/enter.rs";
const ACQUIRE: &str = "lockkit-zk/src/store/acquire.rs";
const RENEW: &str = "lockkit-zk/src/store/renew.rs";
const FENCE: &str = "lockkit-zk/src/wire/fence.rs";
const RELEASE: &str = "lockkit-zk/src/store/release.rs";
const WAIT: &str = "lockkit-zk/src/store/wait.rs";
const DIRECTORY: &str = "lockkit-zk/src/store/directory.rs";
const IN_PLACE: &str = "lockkit-zk/src/store/in_place.rs";
const WINDOWS: &str = "lockkit-zk/src/client/windows.rs";
const DOWNGRADE: &str = "lockkit-zk/src/store/downgrade.rs";
const RECORDS: &str = "lockkit-zk/src/store/records.rs";

pub(crate) const ALL: &[Safeguard] = &[
    Safeguard {
        name: "proof_sent",
        does: "A session lives from the moment at which a request was sent",
        file: PROOF,
        code: "self.trips.push_back(«Trip { sent, answered }»)",
        without: "Trip { sent: answered, answered }",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it",
    },
    Safeguard {
        name: "proof_answered",
        does: "A request proves something when it is answered",
        file: PROOF,
        code: ".find(move |trip| «trip.answered <= moment»)",
        without: "trip.sent <= moment",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it",
    },
    Safeguard {
        name: "proof_spacing",
        does: "Between the first and the second request of a proof is half a tick",
        file: PROOF,
        code: "find(|trip| «trip.answered + spacing <= second.sent»)",
        without: "trip.answered <= second.sent",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it",
    },
    Safeguard {
        name: "proof_drift",
        does: "A session is believed in for less than its timeout: the leader's clock may be faster",
        file: PROOF,
        code: "«sent + (self.timeout - self.timeout / 100)»",
        without: "sent + self.timeout",
        noticed_by: "lockkit-zk/lib::client::proof::tests::a_new_session_lasts_from_its_first_request",
    },
    Safeguard {
        name: "proof_moved",
        does: "A session that moved to another server proves nothing until its timeout is known",
        file: PROOF,
        code: "if «self.unsettled().is_some()» {\n            return;\n        }\n        self.written",
        without: "false",
        noticed_by: "lockkit-zk/lib::client::proof::tests::until_the_timeout_is_known_a_write_proves_nothing",
    },
    Safeguard {
        name: "proof_own_node",
        does: "A write proves something only if the session is the one that has the node",
        file: HEARTBEAT,
        code: "Ok(_) if «own?.is_empty()» =>",
        without: "{ drop(own); false }",
        noticed_by: "lockkit-zk/zk::reconnect::a_reconnection_in_a_new_session_ends_the_leases_of_the_old_one",
    },
    Safeguard {
        name: "silence",
        does: "A session that sends, but understands no answer, is given up after its timeout",
        file: SESSION,
        code: "if «self.client.state() == zk::SessionState::SyncConnected» &&",
        without: "false",
        noticed_by: "lockkit-zk/zk::faults::a_session_whose_answers_can_not_be_read_is_replaced",
    },
    Safeguard {
        name: "silence_elsewhere",
        does: "So is one whose runtime nobody drives, by those who ask on another",
        file: SESSION,
        code: "Err(_) => Err(«self.unheard(bound)»),",
        without: "Failure::TimedOut(bound)",
        noticed_by: "lockkit-zk/zk::waiting::a_store_outlives_a_runtime_that_nobody_drives",
    },
    Safeguard {
        name: "zk_first_node",
        does: "A lock's directory has had a node when it is made, so that the servers remove it whatever becomes of its maker",
        file: ZNODES,
        code: "«self.add_lock(&mut all, lock, b\"\")»?;",
        without: "all.add_create(lock, b\"\", &self.options(CreateMode::Container))",
        noticed_by: "lockkit-zk/zk::dropped::a_dropped_acquisition_leaves_no_directory",
    },
    Safeguard {
        name: "zk_own_strays",
        does: "What a claim left behind before is not taken for another's",
        file: ENTER,
        code: "return «self.without_strays(queue).await».map(Some);",
        without: "Ok(queue)",
        noticed_by: "lockkit-zk/lib::client::znodes::tests::what_a_claim_left_behind_is_not_in_its_own_way",
    },
    Safeguard {
        name: "zk_over_and_alive",
        does: "A claim whose session was declared over may have a node for as long as others believe in that session's leases",
        file: ACQUIRE,
        code: "|| «self.session.is_over()»;\n        outcome",
        without: "false",
        noticed_by: "lockkit-zk/lib::store::acquire::tests::a_claim_whose_session_is_declared_over_may_have_a_node",
    },
    Safeguard {
        name: "zk_renewals_in_time",
        does: "The renewals of many leases end in time together",
        file: RENEW,
        code: "timeout_at(«deadline», plan",
        without: "deadline + session.timeout()",
        noticed_by: "lockkit-zk/zk::many::many_renewals_that_nobody_answers_end_in_time",
    },
    Safeguard {
        name: "zk_sweep_on",
        does: "What may not be deleted keeps nothing else from being swept up",
        file: ZNODES,
        code: "if «failure.is(&zk::Error::NoAuth)» => swept",
        without: "false",
        noticed_by: "lockkit-zk/lib::client::znodes::tests::what_may_not_be_deleted_keeps_nothing_else_from_being_swept_up",
    },
    Safeguard {
        name: "zk_fence_room",
        does: "A mistyped floor does not use up the fences of a lock",
        file: FENCE,
        code: "{ MAX } else { «MAX - ROOM» };",
        without: "MAX",
        noticed_by: "lockkit-zk/lib::wire::fence::tests::a_mistyped_floor_does_not_use_up_the_fences",
    },
    Safeguard {
        name: "zk_words",
        does: "A word about a broken lease leaves those before it",
        file: ZNODES,
        code: "value::revoked(«&before», token)",
        without: "&[]",
        noticed_by: "lockkit-zk/zk::broken::a_holder_is_told_though_the_next_one_was_broken_too",
    },
    Safeguard {
        name: "zk_words_at_once",
        does: "So it does when several are broken at once",
        file: ZNODES,
        code: ".as_bytes(), «Some(stat.version)»)?",
        without: "None",
        noticed_by: "lockkit-zk/zk::broken::all_that_are_broken_at_once_are_told",
    },
    Safeguard {
        name: "zk_repeated_release",
        does: "A release that is repeated does not call a lease released that was broken",
        file: RELEASE,
        code: "if «!session.is_revoked(lock, &claim.token, bound).await?» =>",
        without: "true",
        noticed_by: "lockkit-zk/zk::broken::a_repeated_release_does_not_hide_that_the_lease_was_revoked",
    },
    Safeguard {
        name: "zk_break_again",
        does: "It does so, too, when its node goes after a break by way of its own store that came to nothing",
        file: RENEW,
        code: "if «deleted» {\n        session.alarm",
        without: "deleted && session.claimed(&token).is_some_and(|claimed| !claimed.releasing)",
        noticed_by: "lockkit-zk/zk::broken::a_break_is_heard_after_one_that_came_to_nothing",
    },
    Safeguard {
        name: "zk_watch_at_home",
        does: "The watch on what is held is minded where the session lives, and not where it was renewed",
        file: RENEW,
        code: "«session.spawn(mind(minded, watch))»;",
        without: "drop(tokio::spawn(mind(minded, watch)))",
        noticed_by: "lockkit-zk/zk::broken::a_break_is_heard_though_the_runtime_of_the_last_renewal_is_not_driven",
    },
    Safeguard {
        name: "zk_watch_over",
        does: "When a watch is not minded any more the next renewal asks for the node",
        file: RENEW,
        code: "self.set(&session, «false»)",
        without: "true",
        noticed_by: "lockkit-zk/zk::broken::a_break_is_heard_after_something_was_written_into_the_node",
    },
    Safeguard {
        name: "zk_released_meanwhile",
        does: "What is being released is not granted",
        file: ACQUIRE,
        code: "is_ours = «!claimed.releasing»;",
        without: "true",
        noticed_by: "lockkit-zk/zk::dropped::what_is_about_to_be_released_is_not_granted",
    },
    Safeguard {
        name: "zk_fence_said",
        does: "A holder whose node says its fence since a write that got no answer goes on to say it",
        file: ACQUIRE,
        code: "write.is_some() || «said» ||",
        without: "false",
        noticed_by: "lockkit-zk/zk::waiting::a_fence_that_was_written_without_an_answer_is_known_to_the_next",
    },
    Safeguard {
        name: "zk_wait",
        does: "A wait ends with the caller's time, whatever it is about to ask",
        file: WAIT,
        code: "passed(«deadline») =>",
        without: "None",
        noticed_by: "lockkit-zk/zk::waiting::a_wait_ends_in_time_however_many_leave_meanwhile",
    },
    Safeguard {
        name: "zk_new_directory",
        does: "A client that makes a lock's directory anew has seen what was written last",
        file: DIRECTORY,
        code: "add_delete(&self.lock, «Some(kept.version)»)?",
        without: "None",
        noticed_by: "lockkit-zk/lib::store::directory::tests::that_the_last_holder_was_revoked_is_known_in_the_new_directory",
    },
    Safeguard {
        name: "zk_window_behind",
        does: "Who waits behind another while a lock is kept looks for the window when that one goes",
        file: WAIT,
        code: "&& «!window::is_kept(&queue.children)»;",
        without: "true",
        noticed_by: "lockkit-zk/zk::windows::who_waits_behind_another_waits_for_the_window_when_that_one_gives_up",
    },
    Safeguard {
        name: "zk_window_said",
        does: "A holder that has its lock kept says so to who waits behind it",
        file: IN_PLACE,
        code: "«all.add_set_data(&node, value.text().as_bytes(), Some(giver.seen))»?;",
        without: "Ok::<(), zk::Error>(())",
        noticed_by: "lockkit-zk/zk::windows::who_waits_for_the_holder_waits_for_the_window",
    },
    Safeguard {
        name: "zk_window_version",
        does: "The record of a window is removed only as it was read",
        file: WINDOWS,
        code: "self.client.delete(&path, «Some(version)»)",
        without: "None",
        noticed_by: "lockkit-zk/lib::client::windows::tests::a_window_that_was_extended_since_it_was_read_is_not_removed",
    },
    Safeguard {
        name: "zk_place_of_a_reader",
        does: "The place of a reader is taken by nobody",
        file: IN_PLACE,
        code: "|node: &&str| «name::mode(node) == Mode::Exclusive» && queue::place(",
        without: "true",
        noticed_by: "lockkit-zk/zk::downgrades::what_can_not_become_a_reader_is_refused",
    },
    Safeguard {
        name: "zk_place_as_seen",
        does: "The place of a lease is taken only as it was seen: its holder may raise the fences of the lock",
        file: IN_PLACE,
        code: "version, seen: «stat.version» }",
        without: "-1",
        noticed_by: "lockkit-zk/zk::downgrades::what_takes_the_place_of_a_lease_has_a_fence_above_what_that_raises_meanwhile",
    },
    Safeguard {
        name: "zk_place_of_a_writer",
        does: "A reader that was a writer raises the fences from the writer's place in the queue",
        file: DOWNGRADE,
        code: "let node = Node { name, czxid: «giver.czxid», sequence };",
        without: "giver.czxid + 1000",
        noticed_by: "lockkit-zk/zk::downgrades::the_fences_of_those_that_wait_lie_above_the_readers",
    },
    // Records, and leases that outlive their clients.
    Safeguard {
        name: "record_fresh",
        does: "A record is what the leader has, not what a server remembers",
        file: RECORDS,
        code: "if «node.is_still(&found).await?» {\n                    return Ok(found",
        without: "true",
        noticed_by: "lockkit-zk/zk::ensemble::a_record_is_never_read_as_it_was",
    },
    Safeguard {
        name: "record_anew",
        does: "A record that was made anew is not taken for the former one",
        file: RECORDS,
        code: "«all.add_check_version(&self.child(&found.child), 0)»",
        without: "Ok(())",
        noticed_by: "lockkit-zk/zk::ensemble::a_record_that_was_made_anew_is_another",
    },
];
