// Takes and releases one lock again and again with Apache Curator's InterProcessMutex, and prints for each grant when it
// was had and when its release began, in nanoseconds of CLOCK_MONOTONIC.
// Arguments: the servers, the path of the lock, how long to hold it in microseconds, for how long in milliseconds.

import java.util.concurrent.locks.LockSupport;
import org.apache.curator.framework.*;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

public class CuratorHot {
    public static void main(String[] arguments) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(arguments[0], 20000, 10000, new RetryOneTime(100));
        client.start();
        InterProcessMutex mutex = new InterProcessMutex(client, arguments[1]);
        long hold = Long.parseLong(arguments[2]) * 1000;
        long end = System.nanoTime() + Long.parseLong(arguments[3]) * 1000000;
        StringBuilder grants = new StringBuilder();
        while (System.nanoTime() < end) {
            mutex.acquire();
            long had = System.nanoTime();
            if (hold > 0) {
                LockSupport.parkNanos(hold);
            }
            grants.append(had).append(' ').append(System.nanoTime()).append('\n');
            mutex.release();
        }
        System.out.print(grants);
        client.close();
    }
}
