package regcache

import (
	"net/url"
	"testing"
	"testing/synctest"
)

// Few indexes are in memory at the same time, also to look up digests.
func TestDigestsWaitForMemory(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		st, err := openStore(dir, 1<<20, nil)
		if err != nil {
			t.Fatal(err)
		}
		base := &url.URL{Scheme: "https", Host: "registry.test"}
		d, err := st.create(meta{})
		if err != nil {
			t.Fatal(err)
		}
		index := []byte(`{"versions":{"1.0.0":{"dist":{"tarball":"https://registry.test/left/-/left-1.0.0.tgz","integrity":"sha512-` +
			`z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg=="}}}}`) // of nothing
		if _, err := d.file.WriteAt(index, d.off); err != nil {
			t.Fatal(err)
		}
		d.size = int64(len(index))
		if err := d.keep(NPM, npmIndex(base, "left", true).key); err != nil {
			t.Fatal(err)
		}
		_ = d.file.Close()
		s := &Service{store: st, rewrites: make(chan struct{}, maxRewrites)}
		for range maxRewrites {
			s.rewrites <- struct{}{}
		}
		got := make(chan digest, 1)
		go func() { got <- s.npmDigest(base, "", "left", "left-1.0.0.tgz") }()
		synctest.Wait()
		if len(got) > 0 {
			t.Error("the index was read while others were in memory")
		}
		<-s.rewrites
		if d := <-got; d.algorithm != "sha512" {
			t.Errorf("the digest: %+v", d)
		}
	})
}
