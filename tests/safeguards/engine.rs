//! The safeguards of the engine: how a lease is got, undone and handed over.

use crate::list::safeguards;

const ENGINE: &str = "lockkit-core/src/engine/mod.rs";
const WAIT: &str = "lockkit-core/src/engine/wait.rs";
const TURN: &str = "lockkit-core/src/engine/turn.rs";
const ASK: &str = "lockkit-core/src/engine/ask.rs";
const NEST: &str = "lockkit-core/src/engine/nest.rs";
const REAPER: &str = "lockkit-core/src/engine/reaper.rs";
const RESUME: &str = "lockkit-core/src/engine/resume.rs";
const RELEASE: &str = "lockkit-core/src/engine/release.rs";
const QUEUE: &str = "lockkit-core/src/engine/queue.rs";
const LOCAL: &str = "lockkit-core/src/engine/local.rs";
const RENEW: &str = "lockkit-core/src/engine/renew.rs";
const KEEP: &str = "lockkit-core/src/engine/keep.rs";
const FLOOR: &str = "lockkit-core/src/wrap/fence_above.rs";
const INFO: &str = "lockkit-core/src/store/info.rs";

safeguards! {
    // Getting a lease.
    useful in WAIT
        "A grant of which too little is left is no grant"
        "«hold.until.since(now) >= useful(if has_session { Duration::ZERO } else { ttl })»" => "hold.until > now"
        by "lockkit-testkit/late::a_grant_of_which_little_is_left_is_none";
    hard_bound in ASK
        "A call to the store ends soon after its caller's time"
        "«(moment + (whole / 10).max(Duration::from_millis(500))).since(now)»" => "Duration::MAX"
        by "lockkit-testkit/queue::nobody_says_contended_before_the_store_answered";
    nested_bound in NEST
        "A nested acquisition ends with its caller's time, too"
        "self.within(«limit», &lease.claim.key, self.renew_now(lease))" => "Limit::Forever"
        by "lockkit-core/owners::a_nested_acquisition_ends_with_the_time_of_its_caller";
    reads_no_writer in "lockkit-core/src/owner.rs"
        "An owner that reads does not wait for itself to write"
        "let message = if «lease.claim.mode == Mode::Shared» && ask.mode" => "false"
        by "lockkit-core/owners::one_that_reads_is_told_so_while_it_waits_to_write";
    misled in WAIT
        "A lock that looks free and is not to be had is asked for after growing pauses"
        "if self.misled >= «MISLED» {" => "u32::MAX"
        by "lockkit-core/polling::a_lock_that_looks_free_and_is_not_to_be_had_is_not_asked_for_all_the_time";
    burnt in WAIT
        "After a burnt token a new one is asked for"
        "let keeps_token = self.keeps_place() && «!contention.burnt»;" => "true"
        by "lockkit-core/tokens::a_new_token_after_the_store_burnt_one";
    goes_on_overtaken in TURN
        "A head of the local queue that was overtaken asks for nothing more with its claim, which was released"
        "std::mem::take(&mut is_first) || «self.queues.touch(seat, None)»;" => "true"
        by "lockkit-testkit/queue::who_was_overtaken_does_not_go_on_with_what_it_had_begun";
    behind_a_place in REAPER
        "The claim of a request that was dropped is released once more if its place was granted the lock before"
        "Self::Ordered { again, .. } if «again» => Self::Twice" => "false"
        by "lockkit-core/queueing::a_request_behind_the_grant_of_a_place_is_released_once_more";
    behind_a_request in REAPER
        "So is that of a request that may have taken a place and be followed by another, in one call"
        "«self.takes_place» || self.before.is_some()" => "false"
        by "lockkit-core/queueing::a_request_behind_the_grant_of_a_place_is_released_once_more";
    refused in WAIT
        "A refusal burns the token, unless the claim keeps a place in a queue"
        "let keeps_token = «self.keeps_place()» && !contention.burnt;" => "true"
        by "lockkit-core/tokens::a_new_token_after_each_refusal_unless_it_keeps_a_place";
    unknown_effect in WAIT
        "After an unknown outcome a new token is asked for"
        "if «self.keeps_place()» && pause.is_ok() {" => "true"
        by "lockkit-core/tokens::a_new_token_after_an_unknown_outcome";
    earlier_requests in WAIT
        "An error says whether any request of an acquisition may have had an effect, not only the last one"
        "match «asked.map_err(|error| doubts.leave_open(error))»? {" => "asked"
        by "lockkit-core/shutdown::what_an_acquisition_left_at_the_store_is_told_with_its_error";
    own_claim_told in WAIT
        "An answer to other tasks is none for a task whose own claim may have been in the way"
        "LocalOutcome::Contended if «in_doubt» => None," => "false"
        by "lockkit-core/yielding::that_its_own_first_claim_was_in_the_way_of_others_is_no_answer";
    late_grant in WAIT
        "After a grant that came too late a new token is asked for"
        "self.failed(late, now).map(«Step::Afresh»)" => "Step::Again"
        by "lockkit-core/tokens::a_new_token_after_an_unknown_outcome";
    own_claim in WAIT
        "A lock that one's own earlier claim may hold is not said to be another's"
        "return if «doubt.is_none()» {" => "true"
        by "lockkit-core/tokens::its_own_earlier_claim_is_no_other_holder";
    place_given_up in WAIT
        "A place in a store's queue is given up before its caller hears that the time is up"
        "«undo.release_within(self.limit.hard(self.engine.now())).await»;" => "()"
        by "lockkit-core/queueing::who_was_told_to_wait_in_vain_has_no_place_any_more";
    own_claim_unheard in WAIT
        "Nor is it said to those who wait in the local queue"
        "Ok(Attempt::Contended(_)) if «!in_doubt» => queue.heard_held(sent)," => "true"
        by "lockkit-testkit/late::nobody_says_contended_because_of_a_claim_in_doubt";
    unsettled in "lockkit-core/src/engine/doubts.rs"
        "An earlier claim is in doubt until its release was answered"
        "«unsettled.strong_count() > 0»" => "false"
        by "lockkit-core/tokens::its_own_earlier_claim_is_no_other_holder";
    unsettled_in_background in REAPER
        "So it is while the release is repeated in the background"
        "«pending.unsettled = Arc::clone(&self.unsettled)»;" => "()"
        by "lockkit-core/tokens::its_own_earlier_claim_is_no_other_holder";
    patience_of_late_comers in WAIT
        "Nobody has less patience with a failing store for having come late"
        ".map(|since| «since.max(start)»)" => "since"
        by "lockkit-testkit/queue::who_came_late_is_patient_for_as_long";
    overtaken_grant in WAIT
        "A grant to a head that was overtaken meanwhile is not believed"
        "«self.engine.queues.at(seat, |queue, now| queue.granted(hold.span, now)).is_none()»" =>
        "{ self.engine.queues.at(seat, |queue, now| queue.granted(hold.span, now)); false }"
        by "lockkit-testkit/late::a_grant_is_none_if_another_went_past_before_it_was_looked_at";
    poll_errors in "lockkit-core/src/engine/poll.rs"
        "The poller wakes those who wait when it gets an error"
        "Err(_) => «self.poller.wake(&keys)»," => "()"
        by "lockkit-testkit/late::whoever_waits_asks_for_itself_when_polling_fails";
    late_resumption in RESUME
        "A lease that is taken up is none if too little is left of it"
        "Ok(Attempt::Granted(hold)) if «self.is_useful(&hold, terms.ttl, self.now())» => {" => "true"
        by "lockkit-core/resume::what_was_heard_too_late_is_not_taken_up";
    // Undoing.
    late_effect in REAPER
        "NotHeld does not end the release of a request that may still be on its way"
        "«self.certainty < Certainty::Doubtful» || self.lapse.is_none_or" => "true"
        by "lockkit-sim/sim::a_late_request_arrives_after_all_and_is_undone";
    asked_twice in REAPER
        "Nor does the release of what one request got, if another one for the claim may still be on its way"
        "if «pending.certainty != Certainty::Twice» {" => "true"
        by "lockkit-core/tokens::what_takes_effect_after_the_release_of_an_earlier_request_is_released_once_more";
    failed_release in REAPER
        "Nor after a release that failed, for the next may be faster than what it follows"
        "pending.certainty = «engine.still(pending.certainty)»;" => "pending.certainty"
        by "lockkit-testkit/late::a_release_that_overtakes_is_repeated";
    late_half in REAPER
        "In a store of two halves, of which one has sessions, NotHeld ends it no sooner than the other half lets go"
        "|lapse| !lapse.is_end && «sent >= lapse.at»" => "{ let _ = sent; true }"
        by "lockkit-core/tokens::what_takes_effect_after_its_release_is_released_once_more";
    left_to_next_home in REAPER
        "A release that ended with its runtime is made again at the next one"
        "«engine.backlog.leave(pending)»;" => "drop(pending)"
        by "lockkit-core/runtimes::a_release_that_ended_with_its_runtime_is_made_at_the_next_use";
    shutdown_waits in ENGINE
        "A shutdown waits for the releases under way"
        "tokio::time::timeout(«timeout», drained)" => "Duration::ZERO"
        by "lockkit-core/queueing::who_gives_up_leaves_the_queue";
    most_owed in INFO
        "A session that owes ten thousand releases takes no more locks"
        "|| «owed < Self::MOST_OWED» {" => "true"
        by "lockkit-testkit/backlog::where_nothing_lapses_no_more_is_asked_than_can_be_undone";
    few_retries in "lockkit-core/src/engine/backlog.rs"
        "Few failed releases are repeated at a time"
        "tries: Semaphore::new(«RETRIED_AT_ONCE»)" => "Semaphore::MAX_PERMITS"
        by "lockkit-testkit/backlog::where_nothing_lapses_no_more_is_asked_than_can_be_undone";
    // Handing over.
    hand_over_unseen in RELEASE
        "The lease of a leader is not handed over, for others are to see the next one"
        "&& «lease.terms.hands_over»" => "true"
        by "lockkit-core/local_queue::the_lease_of_a_leader_is_handed_to_no_other";
    hand_over_suspect in RELEASE
        "A lease in doubt is not handed over"
        "&& «state.is_sure()»\n" => "true"
        by "lockkit-testkit/hand_over::a_lease_in_doubt_is_not_handed_over";
    hand_over_short in RELEASE
        "A lease that is about to end is not handed over"
        "&& «state.deadline().since(now) >= useful(lease.ttl)»\n" => "true"
        by "lockkit-testkit/hand_over::a_lease_that_is_about_to_end_is_not_handed_over";
    take_short in RELEASE
        "A lease that was about to end when its next holder came is not taken"
        "if «state.deadline().since(now) < useful(lease.ttl)» {" => "false"
        by "lockkit-testkit/hand_over::a_lease_that_is_about_to_end_is_not_taken";
    hand_over_ttl in QUEUE
        "A lease goes only to those who asked for the same ttl"
        "let suits = «front.terms.ttl == terms.ttl»" => "true"
        by "lockkit-testkit/hand_over::a_lease_is_not_handed_over_to_another_ttl";
    hand_over_fence_above in QUEUE
        "Nor to those who want a fence above a number that its holder did not ask for"
        "let is_above = «front.terms.fence_above <= terms.fence_above»;" => "true"
        by "lockkit-testkit/hand_over::a_lease_is_not_handed_to_one_who_wants_a_higher_fence";
    hand_over_no_renewal in QUEUE
        "A lease does not go to those who don't want it renewed"
        "front.terms.ttl == terms.ttl && «front.terms.renew» && front.terms.hands_over;" => "true"
        by "lockkit-core/life::a_lease_without_renewal_lasts_for_its_ttl";
    hand_over_seen in QUEUE
        "Nor to those who are to be seen at the store, such as a leader"
        "front.terms.renew && «front.terms.hands_over»;" => "true"
        by "lockkit-core/local_queue::a_leader_is_handed_no_lease_of_another";
    hand_over_times in QUEUE
        "A lease is handed over so many times"
        "if «self.run >= rule.times» || now" => "false"
        by "lockkit-testkit/hand_over::a_busy_process_lets_others_go_first";
    hand_over_within in QUEUE
        "A lease is handed over for so long"
        "self.run >= rule.times || «now.since(since) > rule.within»" => "false"
        by "lockkit-testkit/hand_over::hand_over_ends_after_its_time";
    courtesy in RELEASE
        "After a run of hand-overs this process keeps back while others wait"
        "if «ended» {\n                self.queues.released_to_others(key, None" => "false"
        by "lockkit-testkit/hand_over::a_busy_process_lets_others_go_first";
    courtesy_alone in LOCAL
        "So does a process that takes and releases a lock in a loop"
        "if had_run || «now > lock.since + courtesy» {" => "false"
        by "lockkit-testkit/hand_over::a_busy_process_lets_others_go_first";
    courtesy_far in RELEASE
        "It keeps back for as long as others need to get the lock, also where trips are long"
        "(«2 * round_trip»).clamp(" => "0 * round_trip"
        by "lockkit-testkit/hand_over::a_busy_process_lets_others_go_first";
    overtaking in QUEUE
        "A head that is not polled is overtaken"
        "let overdue = «idle + OVERDUE.saturating_mul(u32::try_from(at).unwrap_or(u32::MAX).saturating_add(1))»;" =>
        "now + Duration::from_secs(1_000_000)"
        by "lockkit-testkit/queue::who_is_up_and_is_not_polled_is_overtaken";
    fences_are_paid_for in QUEUE
        "A grant takes no more fences than the microseconds before it"
        "«likely.min(times).min(self.fences)»" => "likely.min(times)"
        by "lockkit-core/lib::engine::queue::tests::fences_stay_behind_the_clock";
    // Leases that change hands.
    told_on in RENEW
        "The store's word on a lease is told to the task that has it by then"
        "next.filter(|next| «next.claim == former.claim» &&" => "false"
        by "lockkit-core/alarm::an_answer_reaches_the_task_that_has_the_lease_by_then";
    kept_or_released in KEEP
        "A lease that can't keep the lock from others is released"
        "match «self.store.release(claim).await?» {" => "Release::Released { waiters: None }"
        by "lockkit-core/keep::what_can_not_be_kept_is_released";
    kept_above in FLOOR
        "A floor of fences leaves the ttl of a lease that keeps a lock to the store"
        "«self.info().admit_fence_above(fence.floor)»?" => "self.info().admit_terms(request.claim.mode, request.order, request.ttl)"
        by "lockkit-core/keep::a_lock_with_fences_above_a_number_is_kept";
    let_go_unused in RESUME
        "Where no time ends a lease, one that was let go of and is not taken up is released when its ttl is over"
        "if «resume == Resume::WhileSession» {" => "false"
        by "lockkit-core/let_go::what_nobody_takes_up_is_released_when_its_ttl_is_over";
    writer_granted in RESUME
        "The lease of a writer that became a reader can't come to be held any more"
        "undo.arm_release(«Certainty::of(&lease.state(), self.now())», None)" => "Certainty::Ordered { failures: self.failures(), again: false }"
        by "lockkit-core/keep::a_downgrade_without_an_answer_keeps_no_shutdown_waiting";
    refused_release in REAPER
        "Where nothing lapses, a release that was refused is tried again"
        "if «pending.lapses()» {" => "true"
        by "lockkit-testkit/backlog::where_nothing_lapses_a_release_that_was_refused_is_tried_again";
}
