//! The safeguards of Redis.

use crate::list::safeguards;

const SCRIPTS: &str = "lockkit-redis/src/wire/scripts.rs";
const ACQUIRE: &str = "lockkit-redis/src/store/acquire.rs";
const ATTEMPT: &str = "lockkit-redis/src/store/attempt.rs";
const REPLICAS: &str = "lockkit-redis/src/client/replicas.rs";
const SENTINEL: &str = "lockkit-redis/src/client/sentinel.rs";
const VOTE: &str = "lockkit-redis/src/client/vote.rs";
const CONNECTION: &str = "lockkit-redis/src/client/connection.rs";
const EPOCH: &str = "lockkit-redis/src/client/epoch.rs";
const SERVER: &str = "lockkit-redis/src/wire/server.rs";
const LOCKER: &str = "lockkit-core/src/locker.rs";
const RECORDS: &str = "lockkit-redis/src/store/records.rs";

safeguards! {
    fence_clock in SCRIPTS
        "A new fence counter starts at the server's clock"
        r#"Script::new(&[«include_str!("scripts/batch.lua")»]));"# =>
        r#"&*include_str!("scripts/batch.lua").replace("max(fence, now, least)", "max(fence, least)").leak()"#
        by "lockkit-redis/redis::fences::no_fence_comes_twice_after_the_data_was_deleted";
    run_mark in EPOCH
        "Clients that know one run of a server by two epochs take each other's moments for those of one clock"
        r#"let run_mark = «format!("@{}", part(1)?.get(..8).ok_or_else(odd)?)»;"# => "mark.clone()"
        by "lockkit-redis/redis::sentinel::a_permit_of_the_dead_comes_back_whatever_epochs_the_others_know";
    silent in ACQUIRE
        "A waiter asks soon when the holder tells nobody of its release"
        "lapses.min(if «is_silent» { SILENT_POLL }" => "false"
        by "lockkit-redis/redis::waiting::a_holder_that_tells_nobody_is_not_waited_for_long";
    wait_over in ACQUIRE
        "Messages do not prolong a wait"
        "if «rest.is_zero()» {" => "false"
        by "lockkit-redis/redis::waiting::a_wait_ends_when_it_is_over_however_many_messages_come";
    permits_room in SCRIPTS
        "No more hold a semaphore than it has permits"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("call('ZCARD', members) < tonumber(string.sub(mode, 2))", "true"))"#
        by "lockkit-redis/redis::kinds::all_kinds_of_holders_exclude_each_other";
    former_readers in SCRIPTS
        "Leases of readers whose lock ended come to no new life"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("call('DEL', members, leases)", "call('TIME')"))"#
        by "lockkit-redis/redis::kinds::members_of_a_group_that_ended_are_lost";
    group_floor in SCRIPTS
        "A reader that joins others is above all that was given out before it connected"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("if not fence or tonumber(fence) < least then", "if not fence then"))"#
        by "lockkit-redis/redis::kinds::readers_of_a_group_that_came_back_are_above_writers_since";
    group_raised in SCRIPTS
        "A reader that joins others is not below the floor that one of them was renewed with"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("if fence and tonumber(fence) < least then", "if false then"))"#
        by "lockkit/compliance::redis::modes::a_reader_keeps_the_floor_of_a_renewal";
    passed_by in SCRIPTS
        "A waiter whose connection is gone holds nobody up"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("return answer.err or answer[2] > 0", "return answer.err or true"))"#
        by "lockkit-redis/redis::kinds::a_waiter_that_is_gone_is_passed_by";
    queue_first in SCRIPTS
        "A try passes nobody that waits in the queue"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("if may_grant and call('EXISTS', queue) == 0 and", "if may_grant and"))"#
        by "lockkit/compliance::redis::fairness::a_try_passes_no_waiting_writer";
    present_place in SCRIPTS
        "No waiter is granted a lock with the mark of a former epoch"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("elseif is_present(tail) and", "elseif"))"#
        by "lockkit-redis/redis::failover::no_lease_is_granted_with_the_mark_of_a_former_epoch";
    next_in_queue in SCRIPTS
        "An error with the next in a queue takes no grant back"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("pcall(serve)", "serve()"))"#
        by "lockkit-redis/redis::kinds::an_error_with_the_next_in_the_queue_takes_no_grant_back";
    pause in ATTEMPT
        "A server that took over grants nothing for the longest ttl"
        "epoch.and_then(|epoch| «epoch.pause(self.clock.now())»)" => "None"
        by "lockkit-redis/redis::failover::a_lease_that_was_not_replicated_is_waited_for";
    started in SCRIPTS
        "So does a server that has just started, which may have had a predecessor"
        r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"# =>
        r#"include_str!("scripts/epoch.lua").replace("since = now - math", "since = now - 3600000 - math").into()"#
        by "lockkit-redis/redis::reshard::a_young_server_pauses_for_the_whole_of_the_longest_ttl";
    known_run in SCRIPTS
        "A server's uptime is not believed where another run of it is known"
        r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"# =>
        r#"include_str!("scripts/epoch.lua").replace("not has_backlog and not is_known", "not has_backlog").into()"#
        by "lockkit-redis/redis::reshard::a_clock_that_is_set_forward_after_a_restart_ends_no_pause";
    first_replica in SCRIPTS
        "A server that has had a replica may have been promoted without a trace, so that its uptime is not believed"
        r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"# =>
        r#"include_str!("scripts/epoch.lua").replace("and not has_backlog", "").into()"#
        by "lockkit-redis/redis::sentinel::a_promotion_that_its_first_replica_hides_is_waited_for";
    seen_run in SCRIPTS
        "Nor if it was believed by clients that knew of none"
        r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"# =>
        r#"include_str!("scripts/epoch.lua").replace("elseif doubt == '?' and", "elseif false and").into()"#
        by "lockkit-redis/redis::reshard::a_clock_that_is_set_forward_after_a_restart_ends_no_pause";
    moving_note in "lockkit-redis/src/client/note.rs"
        "A member whose note is on its way to another is asked for one in another slot"
        "Err(e) if «self.evade(e)» =>" => "{ let _ = (Self::evade, e); false }"
        by "lockkit-redis/redis::reshard::the_note_is_kept_elsewhere_while_its_slot_is_on_its_way";
    former_run in "lockkit-redis/src/client/dialer.rs"
        "A node that restarted is no older than the end of the connection to what it was before"
        "if «!self.run_id.is_empty() && facts.run_id != self.run_id» {" => "false"
        by "lockkit-redis/redis::faults::a_run_that_follows_upon_another_is_no_older_than_the_end_of_that";
    old_map in "lockkit-redis/src/client/cluster.rs"
        "Silent members are not waited for before one is asked that answers"
        "_ = timeout(«self.config.timeout / 4», self.refresh(is_wrong)).await;" => "Duration::MAX"
        by "lockkit-redis/redis::cluster::silent_members_are_not_waited_for_twice";
    silent_member in "lockkit-redis/src/store/renew.rs"
        "A member that can't be reached keeps no leases of others waiting"
        "connection_within(«store.timeout.min(shortest / 8)»)" => "store.timeout"
        by "lockkit-redis/redis::cluster::a_member_that_can_not_be_reached_keeps_no_others_from_being_renewed";
    epoch_mark in SCRIPTS
        "Only the server that granted a lease renews it"
        r#"GUARD, MARK, «include_str!("scripts/renew.lua")»"# => r#"&*include_str!("scripts/renew.lua").replace(" mark and ", " false and ").leak()"#
        by "lockkit-redis/redis::failover::sentinel_a_replicated_lease_is_not_renewed";
    guard in SCRIPTS
        "A script changes nothing on a server that was replaced since the connection was made"
        "«Self::plain(numbered)»" => r#"{
            let other = " or not string.find(replication, 'master_replid:' .. id, 1, true)";
            Self::plain(numbered.replace(other, ""))
        }"#
        by "lockkit-redis/redis::failover::a_change_that_nobody_saw_is_noticed";
    full_shared in SCRIPTS
        "A full server renews readers and permits"
        "«Self::plain(numbered)»" => r#"Self::plain(numbered.replace("write_nothing()\n  call('HSET'", "call('HSET'"))"#
        by "lockkit-redis/redis::full::sentinels";
    full_note in SCRIPTS
        "A client that connects to a full server leaves its note there"
        r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"# =>
        r#"include_str!("scripts/epoch.lua").replace("redis.pcall('PEXPIRE', KEYS[1], CENTURY)", "").into()"#
        by "lockkit-redis/redis::full::sentinels";
    full_replicas in REPLICAS
        "A full server has its replicas acknowledge a renewal"
        "if «connection.accept(extended, Sent::ReadOnly)? != Value::Int(1)»" => "true"
        by "lockkit-redis/redis::full::one_server";
    promoted in SENTINEL
        "A primary that is being replaced is not taken for the one that its successor's epoch belongs to"
        "let (host, port): (String, u16) = «redis::from_redis_value(address.clone()).map_err(|_| odd())?»;" =>
        r#"(fields["ip"].clone(), fields["port"].parse().map_err(|_| odd())?)"#
        by "lockkit-redis/redis::sentinel::a_server_that_is_being_replaced_is_not_believed_in";
    same_epoch in VOTE
        "Of two primaries at the same epoch the one counts that a majority of the sentinels names"
        "«*like >= majority || *like == newest().count()»" => "true"
        by "lockkit-redis/redis::sentinel::which_sentinel_answers_last_decides_nothing";
    floor_of_successor in CONNECTION
        "A server that took over grants fences above its predecessor's clock"
        "(Some(epoch), _) => «Ok(epoch.floor)»" => "Ok(Fence::NONE)"
        by "lockkit-redis/redis::failover::a_lease_that_was_not_replicated_is_waited_for";
    floor_of_connection in CONNECTION
        "After a reconnection fences are above the server's clock"
        "(None, FenceClock::Store) => «self.clock.clone()»" => "Ok(Fence::NONE)"
        by "lockkit-redis/redis::fences::no_fence_comes_twice_after_a_restart_from_a_snapshot";
    reconnections in CONNECTION
        "A replaced connection is counted, and each user of the store sees the count"
        "if «is_broken» {\n            self.reconnections.add_one();" => "false"
        by "lockkit-redis/redis::faults::a_release_that_overtakes_what_was_abandoned_is_repeated";
    uptime in SERVER
        "A server that says that it is up for one second may have just started"
        r#"«field(info, "uptime_in_seconds").parse::<u64>().unwrap_or(0).saturating_sub(1)»;"# =>
        r#"field(info, "uptime_in_seconds").parse::<u64>().unwrap_or(0)"#
        by "lockkit-redis/lib::wire::server::tests::facts_are_read_and_not_guessed";
    zk_break_without_answer in LOCKER
        "A holder looks at once when its lease may have been broken by way of its own store"
        "alarm: «self.info().alarm.as_ref()», token }" => "None"
        by "lockkit-zk/zk::broken::a_break_by_way_of_its_own_store_is_heard_though_its_reply_is_lost";
    // Slots that move.
    slot_clock in SCRIPTS
        "Leases that share a lock last where its slot goes, whatever the clock of the member that granted them"
        "Script::new(&[GUARD, MARK, «include_str!(\"scripts/queue.lua\")»])" =>
        r#"&*include_str!("scripts/queue.lua").replace("string.sub(value, -#run_mark) ~= run_mark", "false").leak()"#
        by "lockkit-redis/redis::reshard::a_lease_that_is_shared_lasts_where_its_slot_goes";
    // Records, and leases that outlive their clients.
    record_replicas in RECORDS
        "A record is neither read nor written as long as too few replicas have it"
        "let Err(shortfall) = «replicas.confirm(&connection).await»" => "Ok(())"
        by "lockkit-redis/redis::replicas::a_record_that_the_replica_lacks_is_neither_read_nor_written";
    // Resources.
    former_resource in CONNECTION
        "A resource in Redis does not count what a former primary says after the switch"
        "self.epoch.is_some() || «self.watches.is_some()»" => "false"
        by "lockkit-redis/redis::fenced::what_the_former_primary_says_after_a_switch_does_not_count";
    last_writer_redis in SCRIPTS
        "A resource in Redis remembers the last writer beside a reader"
        "Script::new(&[«FENCED_SHARED_CODE»])" => r#"&*FENCED_SHARED_CODE.replace("fence .. ' ' .. writer", "fence").leak()"#
        by "lockkit-redis/redis::fenced::the_scripts_keep_the_rule_of_the_core";
}
