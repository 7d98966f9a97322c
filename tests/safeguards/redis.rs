//! The safeguards of Redis.

use crate::list::Safeguard;

const SCRIPTS: &str = "lockkit-redis/src/wire/scripts.rs";
const ACQUIRE: &str = "lockkit-redis/src/store/acquire.rs";
const REPLICAS: &str = "lockkit-redis/src/client/replicas.rs";
const SENTINEL: &str = "lockkit-redis/src/client/sentinel.rs";
const VOTE: &str = "lockkit-redis/src/client/vote.rs";
const CONNECTION: &str = "lockkit-redis/src/client/connection.rs";
const SERVER: &str = "lockkit-redis/src/wire/server.rs";
const LOCKER: &str = "lockkit-core/src/locker.rs";
const RECORDS: &str = "lockkit-redis/src/store/records.rs";

pub(crate) const ALL: &[Safeguard] = &[
    Safeguard {
        name: "fence_clock",
        does: "A new fence counter starts at the server's clock",
        file: SCRIPTS,
        code: r#"Script::new(&[«include_str!("scripts/batch.lua")»]));"#,
        without: r#"&*include_str!("scripts/batch.lua").replace("max(fence, now, least)", "max(fence, least)").leak()"#,
        noticed_by: "lockkit-redis/redis::fences::no_fence_comes_twice_after_the_data_was_deleted",
    },
    Safeguard {
        name: "silent",
        does: "A waiter asks soon when the holder tells nobody of its release",
        file: ACQUIRE,
        code: "lapses.min(if «is_silent» { SILENT_POLL }",
        without: "false",
        noticed_by: "lockkit-redis/redis::waiting::a_holder_that_tells_nobody_is_not_waited_for_long",
    },
    Safeguard {
        name: "wait_over",
        does: "Messages do not prolong a wait",
        file: ACQUIRE,
        code: "if «rest.is_zero()» {",
        without: "false",
        noticed_by: "lockkit-redis/redis::waiting::a_wait_ends_when_it_is_over_however_many_messages_come",
    },
    Safeguard {
        name: "permits_room",
        does: "No more hold a semaphore than it has permits",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("call('ZCARD', members) < tonumber(string.sub(mode, 2))", "true"))"#,
        noticed_by: "lockkit-redis/redis::kinds::all_kinds_of_holders_exclude_each_other",
    },
    Safeguard {
        name: "former_readers",
        does: "What is left of readers whose lock ended comes to no new life",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("call('DEL', members, leases)", "call('TIME')"))"#,
        noticed_by: "lockkit-redis/redis::kinds::members_of_a_group_that_ended_are_lost",
    },
    Safeguard {
        name: "group_floor",
        does: "A reader that joins others is above all that was given out before it connected",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("if not fence or tonumber(fence) < least then", "if not fence then"))"#,
        noticed_by: "lockkit-redis/redis::kinds::readers_of_a_group_that_came_back_are_above_writers_since",
    },
    Safeguard {
        name: "passed_by",
        does: "A waiter whose connection is gone holds nobody up",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("return answer.err or answer[2] > 0", "return answer.err or true"))"#,
        noticed_by: "lockkit-redis/redis::kinds::a_waiter_that_is_gone_is_passed_by",
    },
    Safeguard {
        name: "queue_first",
        does: "A try passes nobody that waits in the queue",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("if may_grant and call('EXISTS', queue) == 0 and", "if may_grant and"))"#,
        noticed_by: "lockkit/compliance::redis::fairness::a_try_passes_no_waiting_writer",
    },
    Safeguard {
        name: "present_place",
        does: "No waiter is granted a lock with the mark of a former epoch",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("elseif is_present(tail) and", "elseif"))"#,
        noticed_by: "lockkit-redis/redis::failover::no_lease_is_granted_with_the_mark_of_a_former_epoch",
    },
    Safeguard {
        name: "next_in_queue",
        does: "What goes wrong with the next in a queue takes no grant back",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("pcall(serve)", "serve()"))"#,
        noticed_by: "lockkit-redis/redis::kinds::an_error_with_the_next_in_the_queue_takes_no_grant_back",
    },
    Safeguard {
        name: "pause",
        does: "A server that took over grants nothing for the longest ttl",
        file: ACQUIRE,
        code: "epoch.and_then(|epoch| «epoch.pause(self.clock.now())»)",
        without: "None",
        noticed_by: "lockkit-redis/redis::failover::a_lease_that_was_not_replicated_is_waited_for",
    },
    Safeguard {
        name: "started",
        does: "So does a server that has just started, which may have had a predecessor",
        file: SCRIPTS,
        code: r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"#,
        without: r#"include_str!("scripts/epoch.lua").replace("since = now - math", "since = now - 3600000 - math").into()"#,
        noticed_by: "lockkit-redis/redis::sentinel::a_server_that_just_started_is_waited_for",
    },
    Safeguard {
        name: "known_run",
        does: "A server's uptime is not believed where another run of it is known",
        file: SCRIPTS,
        code: r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"#,
        without: r#"include_str!("scripts/epoch.lua").replace("not promoted and not is_known", "not promoted").into()"#,
        noticed_by: "lockkit-redis/redis::reshard::a_clock_that_is_set_forward_after_a_restart_ends_no_pause",
    },
    Safeguard {
        name: "seen_run",
        does: "Nor if it was believed by clients that knew of none",
        file: SCRIPTS,
        code: r#"Script::plain(«include_str!("scripts/epoch.lua").into()»));"#,
        without: r#"include_str!("scripts/epoch.lua").replace("elseif doubt == '?' and", "elseif false and").into()"#,
        noticed_by: "lockkit-redis/redis::reshard::a_clock_that_is_set_forward_after_a_restart_ends_no_pause",
    },
    Safeguard {
        name: "moving_note",
        does: "A member whose note is on its way to another is asked for one in another slot",
        file: "lockkit-redis/src/client/note.rs",
        code: "Err(e) if «self.evade(e)» =>",
        without: "{ let _ = (Self::evade, e); false }",
        noticed_by: "lockkit-redis/redis::reshard::the_note_is_kept_elsewhere_while_its_slot_is_on_its_way",
    },
    Safeguard {
        name: "former_run",
        does: "A node that restarted is no older than the end of the connection to what it was before",
        file: "lockkit-redis/src/client/dialer.rs",
        code: "if «!self.run_id.is_empty() && facts.run_id != self.run_id» {",
        without: "false",
        noticed_by: "lockkit-redis/redis::faults::a_run_that_follows_upon_another_is_no_older_than_the_end_of_that",
    },
    Safeguard {
        name: "old_map",
        does: "Silent members are not waited for before one is asked that answers",
        file: "lockkit-redis/src/client/cluster.rs",
        code: "_ = timeout(«self.config.timeout / 4», self.refresh(is_wrong)).await;",
        without: "Duration::MAX",
        noticed_by: "lockkit-redis/redis::cluster::silent_members_are_not_waited_for_twice",
    },
    Safeguard {
        name: "epoch_mark",
        does: "Only the server that granted a lease renews it",
        file: SCRIPTS,
        code: r#"GUARD, MARK, «include_str!("scripts/renew.lua")»"#,
        without: r#"&*include_str!("scripts/renew.lua").replace(" mark and ", " false and ").leak()"#,
        noticed_by: "lockkit-redis/redis::failover::sentinel_a_replicated_lease_is_not_renewed",
    },
    Safeguard {
        name: "guard",
        does: "A script changes nothing on a server that was replaced since the connection was made",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"{
            let other = " or not string.find(replication, 'master_replid:' .. id, 1, true)";
            Self::plain(numbered.replace(other, ""))
        }"#,
        noticed_by: "lockkit-redis/redis::failover::a_change_that_nobody_saw_is_noticed",
    },
    Safeguard {
        name: "full_shared",
        does: "A full server renews readers and permits",
        file: SCRIPTS,
        code: "«Self::plain(numbered)»",
        without: r#"Self::plain(numbered.replace("call('HDEL', places, me)\n  call('HSET'", "call('HSET'"))"#,
        noticed_by: "lockkit-redis/redis::full::sentinels",
    },
    Safeguard {
        name: "full_replicas",
        does: "A full server has its replicas acknowledge a renewal",
        file: REPLICAS,
        code: "if «connection.accept(extended, Sent::ReadOnly)? != Value::Int(1)»",
        without: "true",
        noticed_by: "lockkit-redis/redis::full::one_server",
    },
    Safeguard {
        name: "promoted",
        does: "A primary that is being replaced is not taken for the one that its successor's epoch belongs to",
        file: SENTINEL,
        code: "let (host, port): (String, u16) = «redis::from_redis_value(address.clone()).map_err(|_| odd())?»;",
        without: r#"(fields["ip"].clone(), fields["port"].parse().map_err(|_| odd())?)"#,
        noticed_by: "lockkit-redis/redis::sentinel::a_server_that_is_being_replaced_is_not_believed_in",
    },
    Safeguard {
        name: "same_epoch",
        does: "Of two primaries at the same epoch the one counts that a majority of the sentinels names",
        file: VOTE,
        code: "«*like >= majority || *like == newest().count()»",
        without: "true",
        noticed_by: "lockkit-redis/redis::sentinel::which_sentinel_answers_last_decides_nothing",
    },
    Safeguard {
        name: "floor_of_successor",
        does: "A server that took over grants fences above its predecessor's clock",
        file: CONNECTION,
        code: "(Some(epoch), _) => «Ok(epoch.floor)»",
        without: "Ok(Fence::NONE)",
        noticed_by: "lockkit-redis/redis::failover::a_lease_that_was_not_replicated_is_waited_for",
    },
    Safeguard {
        name: "floor_of_connection",
        does: "After a reconnection fences are above the server's clock",
        file: CONNECTION,
        code: "(None, FenceClock::Store) => «self.clock.clone()»",
        without: "Ok(Fence::NONE)",
        noticed_by: "lockkit-redis/redis::fences::no_fence_comes_twice_after_a_restart_from_a_snapshot",
    },
    Safeguard {
        name: "uptime",
        does: "A server that says that it is up for one second may have just started",
        file: SERVER,
        code: r#"«field(info, "uptime_in_seconds").parse::<u64>().unwrap_or(0).saturating_sub(1)»;"#,
        without: r#"field(info, "uptime_in_seconds").parse::<u64>().unwrap_or(0)"#,
        noticed_by: "lockkit-redis/lib::wire::server::tests::facts_are_read_and_not_guessed",
    },
    Safeguard {
        name: "zk_break_without_answer",
        does: "A holder looks at once when its lease may have been broken by way of its own store",
        file: LOCKER,
        code: "alarm: «self.info().alarm.as_ref()», token }",
        without: "None",
        noticed_by: "lockkit-zk/zk::broken::a_break_by_way_of_its_own_store_is_heard_though_its_reply_is_lost",
    },
    // Records, and leases that outlive their clients.
    Safeguard {
        name: "record_replicas",
        does: "A record is neither read nor written as long as too few replicas have it",
        file: RECORDS,
        code: "let Err(shortfall) = «replicas.confirm(&connection).await»",
        without: "Ok(())",
        noticed_by: "lockkit-redis/redis::replicas::a_record_that_the_replica_lacks_is_neither_read_nor_written",
    },
    // Resources with readers.
    Safeguard {
        name: "last_writer_redis",
        does: "A resource in Redis remembers the last writer beside a reader",
        file: SCRIPTS,
        code: "Script::new(&[«FENCED_SHARED_CODE»])",
        without: r#"&*FENCED_SHARED_CODE.replace("fence .. ' ' .. writer", "fence").leak()"#,
        noticed_by: "lockkit-redis/redis::fenced::the_scripts_keep_the_rule_of_the_core",
    },
];
