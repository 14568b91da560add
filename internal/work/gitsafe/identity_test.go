package gitsafe

import "testing"

// Different spellings of one URL are one repository; the homes of two users are not.
func TestNormalURL(t *testing.T) {
	for raw, want := range map[string]string{
		"https://github.com/example/app":                      "https://github.com/example/app",
		"https://alice:token@GitHub.com:443/example/app.git/": "https://github.com/example/app",
		"git@github.com:example/app.git":                      "ssh://git@github.com/example/app",
		"ssh://git@github.com:22/example/app":                 "ssh://git@github.com/example/app",
		"git+ssh://git@github.com/example/app":                "ssh://git@github.com/example/app",
		"alice@host.test:app":                                 "ssh://alice@host.test/app",
		"bob@host.test:app":                                   "ssh://bob@host.test/app",
		"ssh://host.test:2222/app":                            "ssh://host.test:2222/app",
	} {
		if got := normalURL(raw); got != want {
			t.Errorf("%s: %s, not %s", raw, got, want)
		}
	}
}
