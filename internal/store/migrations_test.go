package store

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"testing"
)

// released are the SHA-256 sums of the migrations, by file name.
var released = map[string]string{
	"00001_init.sql":             "968eecddeb4a352d5cf517725e0f678828c48d8d14b2844d421eadb443af6fe5",
	"00002_audit.sql":            "af802ba4cb9ab6f631bced7684319b8dfa04d00e9be4ebc44d6274320f93d9ff",
	"00003_access.sql":           "4010662e3ab0bec19f5970ae6a32303e9e853c3b4fde3e26f28a1d604ea631a6",
	"00005_policy.sql":           "cf7593f7d072af4fe71ef1c0766b6c5aafed8048f919b888da89c3c7282e1672",
	"00006_hardware.sql":         "c90e02be051d603e6a5a93afbd6d1ef6e57f50000833df1c4470cb0730cfe61f",
	"00007_address_leases.sql":   "350b0448a0613980a902c8f27ccd1ca10a8a9b4a078fd49973c4e39d222100ef",
	"00008_facts.sql":            "98e94e513390de990839cff1682e0ce4e7a216095b13fdddd9996944f7eecc44",
	"00013_model_hosts.sql":      "6a2680ec492efdff173009eb0e3de495da4c813f0c65c2f0bcf11c1bce3881b4",
	"00015_waiting.sql":          "a807b5f37ecd09213a01972b09d3ef3d18efa035212112eaa85012bb2368d794",
	"00016_handles.sql":          "e2d1c337777a38c122caa7ec35722edfec174ab4c01052e69516aa3f84f6b946",
	"00017_renumbered.sql":       "f2a608318d0b3a29f6db5f2d3e6cb84806825353b15de173f2dfd5ad61f0b933",
	"00018_on_disk.sql":          "0c2541d4d4f2bcf3fd11d23dafe82c35dd6d6fd59519c4ff2321a46bcaa52b6e",
	"00019_job_setup.sql":        "675201e25bfac2fa46855ae5c9b9cf9f9f793541cdded4a1a8529c9ccd3274a8",
	"00020_snapshots.sql":        "cbce6c3e66ff4cef5914aad14febf9b4227354cd32f2edcfb2276c712040da95",
	"00021_attempts.sql":         "cbc496a78eb80e0f78795c86bf6dc7592342d50bee20d1918fc2ad2ad4032384",
	"00022_warm_pool.sql":        "4e946bb27cb55d79de679b179994855bba0140c3aeba4480a6781c8e28d775f6",
	"00023_attempts_fork.sql":    "ea8b51d6a061f6d6ee5b81f3e3362fa8a3b9d504db3167bb003ff84fb122696c",
	"00024_list_indexes.sql":     "165ff3276bf9adfc0d814be1cd1ed6dae9a9d346090e322d78ea262b88052a7a",
	"00026_messages.sql":         "4e1f72770be8e3b09af3856e2d4d5c01e41ba7b1e625cbafd227ac60106d1f78",
	"00027_workspaces.sql":       "5ccf6b4e28ed8768b53c35f166291a2a886ffb7faaf2b8231d94f194358aa15a",
	"00028_workspace_leases.sql": "a48d50a56c1c07b2a67f935ab50dd0a9a03cb1d7cc59b19289ad3d86cc4f876a",
	"00029_sessions.sql":         "6b354625b197d775ef396bc0b42475f130b4e43caefdad74321b21ebe5096024",
	"00030_messages_author.sql":  "7c92640b40838a004bb8457e9cdc9a7b24881b4ea22726634fec7eacf7667eaa",
	"00031_grants_messages.sql":  "f5a9652134414e048db9859cbf570eb51bc34f5f73ab3c79fd63b55c02b71167",
	"00033_consistency.sql":      "bcbe360c2a5936b51e852986c9e0d74d06c55b2bfc0e8775a323aa9e6a337d2b",
	"00034_salvage.sql":          "4b6093e7610c8a3c5122b4e4d0afe75d1bf2612fb4646de7ecc45e5601d89736",
	"00035_session_image.sql":    "4f28f34ce67c512167c25fd495bf44726aeb9a55e671811ba8666c55282cf157",
	"00036_job_devcontainer.sql": "25a3278a27407347a7c64e19da5c5720d5e72052b0a5f264308bf60587b202e2",
	"00037_session_branches.sql": "1497f4db6f5d97630ee29833a17b7645b16a77ef77e8a37f7aa9a614cc3d46e7",
	"00038_setup_cache.sql":      "5f9212de2fc4f7777f85f2f6b9d0c3736d56a26f6250cea8e827575ae560da33",
	"00039_nested.sql":           "5459eb8b00c8a27df1b376449089d0deeb699d1d856eb5e85dfa516064eb93da",
	"00040_unbootable.sql":       "fed093d4a3099bab0d971486a66afeeafa348dc584e8a23f9de2d22d8962f120",
	"00041_job_backend.sql":      "b758508eb1c410bb99893f59f8713875449db946c5e0a310813f7aa6d4144c4d",
}

// A migration is never edited, because databases that have applied it do not run
// it again: they would have another schema than new ones. A change of the schema is a
// new migration, with a new entry here.
func TestMigrationsAreNotEdited(t *testing.T) {
	names := migrationNames(t)
	for _, name := range names {
		text, err := fs.ReadFile(migrations(), name)
		if err != nil {
			t.Fatal(err)
		}
		if sum := fmt.Sprintf("%x", sha256.Sum256(text)); released[name] == "" {
			t.Errorf("%s has no entry in released: add %q: %q", name, name, sum)
		} else if sum != released[name] {
			t.Errorf("%s was edited: undo that, and add a new migration", name)
		}
	}
	if len(names) != len(released) {
		t.Errorf("%d migrations, %d entries: a migration must not be removed", len(names), len(released))
	}
}
