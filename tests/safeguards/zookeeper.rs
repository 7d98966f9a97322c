//! The safeguards of ZooKeeper.

use crate::list::safeguards;

const PROOF: &str = "lockkit-zk/src/client/proof.rs";
const HEARTBEAT: &str = "lockkit-zk/src/client/session/heartbeat.rs";
const SESSION: &str = "lockkit-zk/src/client/session.rs";
const ZNODES: &str = "lockkit-zk/src/client/znodes.rs";
const ENTER: &str = "lockkit-zk/src/store/enter.rs";
const ACQUIRE: &str = "lockkit-zk/src/store/acquire.rs";
const GRANT: &str = "lockkit-zk/src/store/grant.rs";
const RENEW: &str = "lockkit-zk/src/store/renew.rs";
const FENCE: &str = "lockkit-zk/src/wire/fence.rs";
const RELEASE: &str = "lockkit-zk/src/store/release.rs";
const WAIT: &str = "lockkit-zk/src/store/wait.rs";
const DIRECTORY: &str = "lockkit-zk/src/store/directory.rs";
const IN_PLACE: &str = "lockkit-zk/src/store/in_place.rs";
const WINDOWS: &str = "lockkit-zk/src/client/windows.rs";
const REPLACE: &str = "lockkit-zk/src/store/replace.rs";
const RECORDS: &str = "lockkit-zk/src/store/records.rs";

safeguards! {
    record_is_no_claim in ZNODES
        "A claim whose node is older than the record of fences reads it"
        "«unpoisoned(&self.uncontended).forget(lock)»;" => "drop(unpoisoned(&self.uncontended))"
        by "lockkit-zk/zk::waiting::one_whose_node_is_older_than_the_record_of_fences_reads_it";
    proof_sent in PROOF
        "A session lives from the moment at which a request was sent"
        "self.trips.push_back(«Trip { sent, answered }»)" => "Trip { sent: answered, answered }"
        by "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it";
    proof_answered in PROOF
        "A request proves something when it is answered"
        ".find(move |trip| «trip.answered <= moment»)" => "trip.sent <= moment"
        by "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it";
    proof_spacing in PROOF
        "Between the first and the second request of a proof is half a tick"
        "find(|trip| «trip.answered + spacing <= second.sent»)" => "trip.answered <= second.sent"
        by "lockkit-zk/lib::client::proof::tests::a_write_proves_what_was_answered_before_the_request_before_it";
    proof_drift in PROOF
        "A session is believed in for less than its timeout: the leader's clock may be faster"
        "«sent + (self.timeout - self.timeout / 100)»" => "sent + self.timeout"
        by "lockkit-zk/lib::client::proof::tests::a_new_session_lasts_from_its_first_request";
    proof_moved in PROOF
        "A session that moved to another server proves nothing until its timeout is known"
        "if «self.unsettled().is_some()» {\n            return;\n        }\n        self.written" => "false"
        by "lockkit-zk/lib::client::proof::tests::until_the_timeout_is_known_a_write_proves_nothing";
    proof_own_node in HEARTBEAT
        "A write proves something only if the session is the one that has the node"
        "Ok(_) if «own?.is_empty()» =>" => "{ drop(own); false }"
        by "lockkit-zk/zk::reconnect::a_reconnection_in_a_new_session_ends_the_leases_of_the_old_one";
    silence in SESSION
        "A session that sends, but understands no answer, is given up after its timeout"
        "let timeouts = if self.client.state() == zk::SessionState::SyncConnected { «1» } else { 2 };" => "1_000"
        by "lockkit-zk/zk::faults::a_session_whose_answers_can_not_be_read_is_replaced";
    silence_elsewhere in SESSION
        "So is one whose runtime nobody drives, by those who ask on another"
        "Err(_) => Err(«self.unheard(bound)»)," => "Failure::TimedOut(bound)"
        by "lockkit-zk/zk::waiting::a_store_outlives_a_runtime_that_nobody_drives";
    zk_first_node in ZNODES
        "A lock's directory has had a node when it is made, so that the servers remove it whatever becomes of its maker"
        "«self.add_lock(&mut all, lock, b\"\")»?;" => "all.add_create(lock, b\"\", &self.options(CreateMode::Container))"
        by "lockkit-zk/zk::dropped::a_dropped_acquisition_leaves_no_directory";
    zk_own_strays in ENTER
        "A node that a claim left behind before is not taken for another's"
        "return «self.without_strays(queue).await».map(Some);" => "Ok(queue)"
        by "lockkit-zk/lib::client::znodes::tests::what_a_claim_left_behind_is_not_in_its_own_way";
    zk_over_and_alive in ACQUIRE
        "A claim whose session was declared over may have a node for as long as others believe in that session's leases"
        "|| «self.session.is_over()»;\n        outcome" => "false"
        by "lockkit-zk/lib::store::acquire::tests::a_claim_whose_session_is_declared_over_may_have_a_node";
    zk_renewals_in_time in RENEW
        "The renewals of many leases end in time together"
        "timeout_at(«deadline», plan" => "deadline + session.timeout()"
        by "lockkit-zk/zk::many::many_renewals_that_nobody_answers_end_in_time";
    zk_sweep_on in ZNODES
        "A node that may not be deleted keeps no others from being swept up"
        "if «failure.is(&zk::Error::NoAuth)» => swept" => "false"
        by "lockkit-zk/lib::client::znodes::tests::what_may_not_be_deleted_keeps_nothing_else_from_being_swept_up";
    zk_raised_a_little in FENCE
        "A lease that takes the place of another lies above the fences that its holder raised, however little"
        "next != record || «counts_from_own»" => "false"
        by "lockkit-zk/lib::wire::fence::tests::no_two_grants_overlap";
    zk_taken_up_heard in RENEW
        "A holder whose lease is taken up by another client hears of it at once"
        "NodeDataChanged && «claimed.written»;" => "false"
        by "lockkit-zk/zk::taken_up::a_holder_hears_at_once_that_its_lease_is_taken_up";
    zk_taken_up_and_dropped in RENEW
        "So does one whose own process takes the lease up, and awaits no answer"
        "NodeDataChanged && «claimed.written»;" => "claimed.written && !claimed.releasing"
        by "lockkit-zk/zk::taken_up::a_holder_hears_at_once_of_what_took_its_lease_up_and_was_dropped";
    zk_fence_room in FENCE
        "A mistyped floor does not use up the fences of a lock"
        "{ MAX } else { «MAX - FENCE_ROOM» };" => "MAX"
        by "lockkit-zk/lib::wire::fence::tests::a_mistyped_floor_does_not_use_up_the_fences";
    zk_words in ZNODES
        "A word about a broken lease leaves those before it"
        "value::revoked(«&before», token)" => "&[]"
        by "lockkit-zk/zk::broken::a_holder_is_told_though_the_next_one_was_broken_too";
    zk_words_at_once in ZNODES
        "So it does when several are broken at once"
        ".as_bytes(), «Some(stat.version)»)?" => "None"
        by "lockkit-zk/zk::broken::all_that_are_broken_at_once_are_told";
    zk_repeated_release in RELEASE
        "A release that is repeated does not call a lease released that was broken"
        "if «!session.is_revoked(lock, &claim.token, bound).await?»\n                && " => "true"
        by "lockkit-zk/zk::broken::a_repeated_release_does_not_hide_that_the_lease_was_revoked";
    zk_repeated_taken_up in RELEASE
        "Nor does it call one released that another had taken up"
        "&& «!is_taken_up(session, lock, node, bound).await?» =>" => "true"
        by "lockkit-zk/zk::taken_up::what_the_giver_sends_late_concerns_nobody_else";
    zk_break_again in RENEW
        "It does so, too, when its node goes after a break by way of its own store that came to nothing"
        "if «deleted» || touched {" => "deleted && session.claimed(&token).is_some_and(|claimed| !claimed.releasing)"
        by "lockkit-zk/zk::broken::a_break_is_heard_after_one_that_came_to_nothing";
    zk_watch_at_home in RENEW
        "The watch on what is held is minded where the session lives, and not where it was renewed"
        "«session.spawn(mind(minded, watch))»;" => "drop(tokio::spawn(mind(minded, watch)))"
        by "lockkit-zk/zk::broken::a_break_is_heard_though_the_runtime_of_the_last_renewal_is_not_driven";
    zk_watch_over in RENEW
        "When a watch is not minded any more the next renewal asks for the node"
        "self.set(&session, «false»)" => "true"
        by "lockkit-zk/zk::broken::a_break_is_heard_after_something_was_written_into_the_node";
    zk_released_meanwhile in GRANT
        "A claim that is being released is not granted"
        "is_ours = «!claimed.releasing»;" => "true"
        by "lockkit-zk/zk::dropped::what_is_about_to_be_released_is_not_granted";
    zk_fence_said in GRANT
        "A holder whose node says its fence since a write that got no answer goes on to say it"
        "write.is_some() || «said» ||" => "false"
        by "lockkit-zk/zk::waiting::a_fence_that_was_written_without_an_answer_is_known_to_the_next";
    zk_wait in WAIT
        "A wait ends with the caller's time, whatever it is about to ask"
        "passed(«deadline») =>" => "None"
        by "lockkit-zk/zk::waiting::a_wait_ends_in_time_however_many_leave_meanwhile";
    zk_new_directory in DIRECTORY
        "A client that makes a lock's directory anew has seen what was written last"
        "add_delete(&self.lock, «Some(kept.version)»)?" => "None"
        by "lockkit-zk/lib::store::directory::tests::that_the_last_holder_was_revoked_is_known_in_the_new_directory";
    zk_window_behind in WAIT
        "A waiter behind another looks for the window of a kept lock when that one goes"
        "&& «!window::is_kept(&queue.children)»;" => "true"
        by "lockkit-zk/zk::windows::who_waits_behind_another_waits_for_the_window_when_that_one_gives_up";
    zk_window_said in IN_PLACE
        "A holder that has its lock kept says so to who waits behind it"
        "«all.add_set_data(&node, value.text().as_bytes(), Some(giver.seen))»?;" => "Ok::<(), zk::Error>(())"
        by "lockkit-zk/zk::windows::who_waits_for_the_holder_waits_for_the_window";
    zk_window_version in WINDOWS
        "The record of a window is removed only as it was read"
        "self.client.delete(&path, «Some(version)»)" => "None"
        by "lockkit-zk/lib::client::windows::tests::a_window_that_was_extended_since_it_was_read_is_not_removed";
    zk_place_of_a_reader in IN_PLACE
        "The place of a reader is taken by nobody"
        "|node: &&str| «name::mode(node) == Mode::Exclusive» && queue::place(" => "true"
        by "lockkit-zk/zk::downgrades::what_can_not_become_a_reader_is_refused";
    zk_place_as_seen in IN_PLACE
        "The place of a lease is taken only as it was seen: its holder may raise the fences of the lock"
        "version, seen: «stat.version» }" => "-1"
        by "lockkit-zk/zk::downgrades::what_takes_the_place_of_a_lease_has_a_fence_above_what_that_raises_meanwhile";
    zk_place_of_a_writer in REPLACE
        "A reader that was a writer raises the fences from the writer's place in the queue"
        "let node = Node { name, czxid: «giver.czxid», sequence };" => "giver.czxid + 1000"
        by "lockkit-zk/zk::downgrades::the_fences_of_those_that_wait_lie_above_the_readers";
    zk_place_taken in REPLACE
        "A lease whose place was taken is not said to be as it was when the next answer is an error"
        "«session.update(self.claim.token, |claimed| claimed.stage = Stage::Queued(node.clone()))»;" => "true"
        by "lockkit-zk/zk::taken_up::a_lease_that_was_taken_up_is_not_said_to_be_as_it_was";
    zk_raise_is_read in IN_PLACE
        "A lease that takes the place of another looks for raised fences itself"
        "let (record, of_record) = «self.session.find_fence_record(&self.lock, self.bound).await?»;" =>
        "self.session.read_fence_record(&self.lock, children, self.bound).await?"
        by "lockkit-zk/zk::downgrades::a_node_that_says_no_fence_any_more_hides_no_raise";
    zk_place_in_turn in IN_PLACE
        "A lease that took the place of another has the place of that one among those that wait, and not that of its own node"
        "(«fence::place_of(record, fence, span).min(stat.czxid)»," => "stat.czxid"
        by "lockkit-zk/zk::taken_up::however_often_it_is_taken_up_those_that_wait_have_higher_fences";
    span_of_a_node in GRANT
        "A node says for how many fences its lease was granted, also if it was made for fewer"
        "!claimed.written || «claimed.span != self.request.fence.span»" => "false"
        by "lockkit-zk/zk::downgrades::the_readers_fence_lies_above_all_that_were_granted";
    // Records, and leases that outlive their clients.
    record_fresh in RECORDS
        "A record is what the leader has, not what a server remembers"
        "if «node.is_still(&found).await?» {\n                    return Ok(found" => "true"
        by "lockkit-zk/zk::ensemble::a_record_is_never_read_as_it_was";
    record_anew in RECORDS
        "A record that was made anew is not taken for the former one"
        "«all.add_check_version(&self.child(&found.child), 0)»" => "Ok(())"
        by "lockkit-zk/zk::ensemble::a_record_that_was_made_anew_is_another";
}
