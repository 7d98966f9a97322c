// Takes and releases one lock with Apache Curator's InterProcessMutex, and leads by it with LeaderSelector, as it is told on
// standard input.
// Arguments: the servers, the session timeout in milliseconds, the path of the lock.

import java.io.*;
import java.nio.file.*;
import java.util.concurrent.*;
import org.apache.curator.framework.*;
import org.apache.curator.framework.recipes.leader.*;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

public class CuratorLock {
    // Leads from the moment in which it is elected until it is told to resign.
    static class Leader extends LeaderSelectorListenerAdapter {
        final CountDownLatch elected = new CountDownLatch(1), told = new CountDownLatch(1), resigned = new CountDownLatch(1);

        @Override
        public void takeLeadership(CuratorFramework client) throws InterruptedException {
            elected.countDown();
            told.await();
            resigned.countDown();
        }
    }

    // Until it has ended, its node may be there.
    static void end(ExecutorService thread) throws InterruptedException {
        thread.shutdown();
        thread.awaitTermination(30, TimeUnit.SECONDS);
    }

    public static void main(String[] arguments) throws Exception {
        int session = Integer.parseInt(arguments[1]);
        CuratorFramework client = CuratorFrameworkFactory.newClient(arguments[0], session, 10000, new RetryOneTime(100));
        client.start();
        InterProcessMutex mutex = new InterProcessMutex(client, arguments[2]);
        Leader leader = null;
        LeaderSelector selector = null;
        ExecutorService thread = null;
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String order; (order = orders.readLine()) != null; ) {
            String[] words = order.split(" ");
            switch (words[0]) {
                case "acquire":
                    boolean acquired = mutex.acquire(Long.parseLong(words[1]), TimeUnit.MILLISECONDS);
                    System.out.println(acquired ? "acquired" : "refused");
                    break;
                case "release":
                    mutex.release();
                    System.out.println("released");
                    break;
                case "lead":
                    leader = new Leader();
                    thread = Executors.newSingleThreadExecutor();
                    selector = new LeaderSelector(client, arguments[2], thread, leader);
                    selector.setId("another");
                    selector.start();
                    boolean leads = leader.elected.await(Long.parseLong(words[1]), TimeUnit.MILLISECONDS);
                    if (!leads) {
                        selector.close();
                        end(thread);
                    }
                    System.out.println(leads ? "leads" : "refused");
                    break;
                case "resign":
                    leader.told.countDown();
                    leader.resigned.await();
                    end(thread);
                    selector.close();
                    System.out.println("resigned");
                    break;
                case "count":
                    Path counter = Paths.get(words[2]);
                    for (int round = Integer.parseInt(words[1]); round > 0; round--) {
                        mutex.acquire();
                        int count = Integer.parseInt(Files.readString(counter));
                        Thread.sleep(1);
                        Files.writeString(counter, Integer.toString(count + 1));
                        mutex.release();
                    }
                    System.out.println("counted");
                    break;
            }
        }
        client.close();
    }
}
